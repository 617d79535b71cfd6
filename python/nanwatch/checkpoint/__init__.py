"""Checkpoints in files: what is in them, whether it is sound, and how two of them differ. Nothing in them is run."""
