"""The health of a tensor together with its elements by power of two, for traces with `counts=True`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .exponents import exponent_histogram
from .ranges import TensorHealth, tensor_health


class CountedHealth(TensorHealth):
    """A TensorHealth that also has `ExponentHistogram.counts`, where the tensor is of floating point."""

    exponents: Mapping[int, int] | None = None


def counted_health(x: Tensor) -> TensorHealth:
    """Return the health of `x` with the counts by exponent. Raises as `tensor_health` does."""
    health = CountedHealth(*tensor_health(x))
    if x.is_floating_point():
        health.exponents = exponent_histogram(x).counts
    return health
