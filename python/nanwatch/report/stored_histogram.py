"""Exponent histogram of one tensor as a report keeps it: plain numbers, so that a report is read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..numerics.formats import floor_log2, limits

if TYPE_CHECKING:
    from torch import Tensor

    from ..numerics.exponents import ExponentHistogram

_MOST = 2**63


@dataclass(frozen=True, slots=True)
class StoredHistogram:
    """`counts[i]` elements of `label` have 2^(first + i) <= |x| < 2^(first + i + 1); the others have no power of two.

    `dtype` is of floating point. There are no zeros at either end of `counts`. Raises ValueError for a dtype without
    limits, for powers of two that it does not have, and for counts that no tensor has.
    """

    label: str
    dtype: str
    first: int
    counts: tuple[int, ...]
    num_zero: int = 0
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0

    def __post_init__(self) -> None:
        ends = limits(self.dtype)
        if ends is None:
            raise ValueError(f"the spread of {self.label} has the dtype {self.dtype!r}, which has no limits")
        least, most = floor_log2(ends.smallest_subnormal), floor_log2(ends.largest)
        last = self.first + len(self.counts) - 1
        if self.counts and not least <= self.first <= last <= most:
            raise ValueError(
                f"the spread of {self.label} goes from 2^{self.first} to 2^{last};"
                f" {self.dtype} has 2^{least} to 2^{most}"
            )
        beside = (self.num_zero, self.num_nan, self.num_posinf, self.num_neginf)
        if min(self.counts + beside) < 0 or max(self.counts + beside) >= _MOST:
            raise ValueError(f"the spread of {self.label} has a count that is below 0 or above {_MOST - 1}")

    @classmethod
    def of(cls, x: Tensor, label: str) -> StoredHistogram | None:
        """Count the elements of `x` in one pass. Return None for integers, complex numbers and unreadable tensors."""
        # Deferred, as is the import below: torch takes a second, and a report is read without it.
        from ..numerics.exponents import exponent_histogram
        from ..numerics.ranges import _dtype_name, unreadable

        if x.is_complex() or limits(_dtype_name(x.dtype)) is None or unreadable(x):
            return None
        try:
            found = exponent_histogram(x)
        except (TypeError, RuntimeError):
            # Memory for it may be short, as after an OutOfMemoryError that is being looked into.
            return None
        first = min(found.counts, default=0)
        counts = tuple(found.counts[e] for e in range(first, max(found.counts, default=first - 1) + 1))
        beside = (found.num_zero, found.num_nan, found.num_posinf, found.num_neginf)
        return cls(label, _dtype_name(found.dtype), first, counts, *beside)

    def restore(self) -> ExponentHistogram:
        """Return the histogram that this one was made from."""
        import torch

        from ..numerics.exponents import ExponentHistogram

        counts = dict(enumerate(self.counts, self.first))
        beside = (self.num_zero, self.num_nan, self.num_posinf, self.num_neginf)
        return ExponentHistogram(getattr(torch, self.dtype), counts, *beside)
