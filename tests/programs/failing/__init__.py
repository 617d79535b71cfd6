"""Small models whose forward fails, in the order of the table in docs/failures.md."""

from . import half, rounding, attention, normalisation, losses, library, inplace, state, training  # noqa: F401, I001
