"""A folder that holds one module call: `capsule` writes and reads it, `replay` makes the call again."""
