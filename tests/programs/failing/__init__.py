"""Small models whose forward fails; docs/failures.md shows some."""

from . import half, rounding, attention, normalisation, losses, library, inplace, state, training  # noqa: F401, I001
