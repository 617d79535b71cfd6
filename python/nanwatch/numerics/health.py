"""The range and the health of a tensor as plain numbers. Reports hold them, so this module needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class AbsRange(NamedTuple):
    """The ends of |x| over a tensor, and whether every element is finite."""

    abs_min: float
    abs_max: float
    isfinite: bool


class TensorHealth(NamedTuple):
    """The range of a tensor and what is in it; counts are elements."""

    abs_min: float
    abs_max: float
    isfinite: bool
    finite_abs_min: float
    """Over the finite elements only; inf when there are none."""
    finite_abs_max: float
    """Over the finite elements only; 0.0 when there are none."""
    num_nan: int
    num_posinf: int
    num_neginf: int
    num_zero: int
    """Zeros of either sign, and elements that a sparse layout does not store."""
    num_subnormal: int
    """Nonzero elements below the smallest normal number of the tensor's own dtype."""
    numel: int
    first_nonfinite: tuple[int, ...] | None
    """Index of the first nan or inf in C order; None when all is finite. Nested: (component, index in it)."""


class HealthWithExponents(TensorHealth):
    """TensorHealth that also has `ExponentHistogram.counts`, for a tensor of floating point."""

    exponents: Mapping[int, int] | None = None
