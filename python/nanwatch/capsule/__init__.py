"""A folder that holds one module call: writing it, reading one that is not trusted, its tensors.

Running the call again is `replay` in `session`.
"""
