"""A folder that holds one module call: writing it, reading it from a stranger, its tensors.

Running the call again is `replay` in `session`.
"""
