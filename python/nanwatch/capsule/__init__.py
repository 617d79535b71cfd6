"""A folder that holds one module call: writing it, reading one that is not trusted.

Running the call again is `replay` in `session`.
"""
