"""Failing models rebuilt from public reports. Their code is our own."""

from . import backwards, forwards  # noqa: F401 - enter their programs
