"""Plain numbers without torch: the limits of each floating-point format, and the range and health of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from math import frexp
from typing import NamedTuple


class Limits(NamedTuple):
    """The ends of a floating-point format: the largest finite, the smallest normal and the smallest number above 0.

    A format without subnormals has its smallest normal number twice.
    """

    largest: float
    smallest_normal: float
    smallest_subnormal: float


def _binary(precision: int, least: int, largest: float) -> Limits:
    """Return a format of `precision` significant bits whose smallest normal number is 2^least."""
    return Limits(largest, 2.0**least, 2.0 ** (least - precision + 1))


_LIMITS = {
    "float64": _binary(53, -1022, (2 - 2.0**-52) * 2.0**1023),
    "float32": _binary(24, -126, (2 - 2.0**-23) * 2.0**127),
    "float16": _binary(11, -14, 65504.0),
    "bfloat16": _binary(8, -126, (2 - 2.0**-7) * 2.0**127),
    "float8_e4m3fn": _binary(4, -6, 448.0),
    "float8_e4m3fnuz": _binary(4, -7, 240.0),
    "float8_e5m2": _binary(3, -14, 57344.0),
    "float8_e5m2fnuz": _binary(3, -15, 57344.0),
    "float8_e8m0fnu": _binary(1, -127, 2.0**127),
}
# The modulus of a complex number is bounded by what its parts can hold, to half a bit.
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def limits(dtype_name: str) -> Limits | None:
    """Return the limits of a format ("float16"; of its parts for "complex64"); None for one that cannot overflow."""
    return _LIMITS.get(_PARTS.get(dtype_name, dtype_name))


def floor_log2(value: float) -> int:
    """Return the e of 2^e <= value < 2^(e+1), for a finite value above 0."""
    return frexp(value)[1] - 1


class AbsRange(NamedTuple):
    """Smallest and largest |x| of a tensor, and whether every element is finite.

    Examples:
        >>> import nanwatch, torch
        >>> low, high, is_finite = nanwatch.abs_range(torch.tensor([2.0, torch.nan]))
        >>> low, high, is_finite
        (nan, nan, False)
    """

    abs_min: float
    abs_max: float
    isfinite: bool


class TensorHealth(NamedTuple):
    """Range of a tensor, and the number of its elements of each kind.

    Examples:
        >>> import nanwatch, torch
        >>> health = nanwatch.tensor_health(torch.tensor([0.0, 1e-40, torch.inf, 3.0]))
        >>> health.numel, health.num_zero, health.num_subnormal, health.num_posinf, health.num_nan
        (4, 1, 1, 1, 0)
    """

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


class Statistics(NamedTuple):
    """Mean and spread of the elements of a tensor. All are nan for a tensor that is not finite or has no element.

    Examples:
        >>> import nanwatch, torch
        >>> found = nanwatch.statistics(torch.tensor([-1.0, 1.0, -1.0, 1.0]))
        >>> found.mean, found.rms, found.kurtosis
        (0.0, 1.0, 1.0)
    """

    mean: float
    rms: float
    """Root mean square."""
    kurtosis: float
    """Fourth central moment by the square of the variance: 3 for a normal distribution; nan if all are equal."""
    beyond_6_sigma: float
    """Share of the elements that lie more than six standard deviations from the mean, 0.0 to 1.0."""


class HealthWithExponents(TensorHealth):
    """TensorHealth that also has `ExponentHistogram.counts`, for a tensor of floating point."""

    exponents: Mapping[int, int] | None = None
