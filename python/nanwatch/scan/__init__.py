"""Checkpoints: `scan` reads their files, the guard reads what is about to become one."""
