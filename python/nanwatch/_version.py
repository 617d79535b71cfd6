"""The version of nanwatch, alone so that every room can read it."""

__version__ = "0.1.0"
