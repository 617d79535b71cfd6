"""Small helpers that know nothing of nanwatch: messages, warnings, optional packages, the terminal.

A helper that knows a frame, a module call or an option belongs into the room of that thing.
"""
