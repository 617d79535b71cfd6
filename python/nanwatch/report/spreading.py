"""From a tensor to its Spread, and from a Spread to the histogram that it was."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.exponents import ExponentHistogram, exponent_histogram
from ..numerics.formats import limits
from ..numerics.ranges import _dtype_name, unreadable
from .spread import Spread


def spread_of(x: Tensor, label: str) -> Spread | None:
    """The spread of `x`, in one pass; None for what has none: integers, complex numbers, what cannot be read."""
    if x.is_complex() or limits(_dtype_name(x.dtype)) is None or unreadable(x):
        return None
    try:
        found = exponent_histogram(x)
    except (TypeError, RuntimeError):
        # A picture less; memory for it may be short, as after an OutOfMemoryError that is being looked into.
        return None
    first = min(found.counts, default=0)
    counts = tuple(found.counts[e] for e in range(first, max(found.counts, default=first - 1) + 1))
    return Spread(
        label,
        _dtype_name(found.dtype),
        first,
        counts,
        found.num_zero,
        found.num_nan,
        found.num_posinf,
        found.num_neginf,
    )


def spreads_of(x: Tensor, label: str) -> tuple[Spread, ...]:
    """The spread of `x`, if it has one."""
    found = spread_of(x, label)
    return () if found is None else (found,)


def histogram_of(spread: Spread) -> ExponentHistogram:
    """The histogram that it was made from."""
    return ExponentHistogram(
        getattr(torch, spread.dtype),
        dict(enumerate(spread.counts, spread.first)),
        spread.num_zero,
        spread.num_nan,
        spread.num_posinf,
        spread.num_neginf,
    )
