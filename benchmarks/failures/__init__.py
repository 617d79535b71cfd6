"""Small models that fail as real ones do, each with the truth about its failure; see case.Case."""

# Imported for the cases they enter into CASES, in the order of the table in docs/failures.md.
from . import half, rounding, attention, normalisation, losses, library, inplace, state, training  # noqa: F401, I001
from .case import CASES, Case, Setup

__all__ = ["CASES", "Case", "Setup"]
