"""The numbers in one tensor: range, health, and what a format would make of them.

The operators `torch.ops.nanwatch.*`, their reference in plain torch and the compiled part are here. Nothing here knows
of modules, frames or files.
"""
