"""Small models whose forward fails; docs/failures.md shows some."""

from . import attention, half, inplace, library, state  # noqa: F401
