"""Checkpoints in files: whether they are sound, how two of them differ, and the guard on saves."""
