"""A folder that runs one module call again elsewhere: writing it, reading it from a stranger, its tensors."""
