"""Small helpers that know nothing of nanwatch: messages to people, the distributed job, the user's program.

A helper that knows a frame, a module call or an option belongs into the room of that thing.
"""
