"""Exponent histogram of one tensor as a report keeps it, and its numbers in words. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ..numerics.formats import floor_log2, limits

if TYPE_CHECKING:
    from ..numerics.distribution import ExponentHistogram

_MOST = 2**63


@dataclass(frozen=True, slots=True)
class StoredHistogram:
    """Exponent histogram of one tensor in plain numbers, as a report keeps it.

    `counts[i]` elements of `label` have 2^(first + i) <= |x| < 2^(first + i + 1). The others have no power of two.

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
    def of(cls, histogram: ExponentHistogram, label: str) -> StoredHistogram:
        """Return the histogram of a tensor of floating point in plain numbers."""
        first, counts = _dense(histogram.counts)
        beside = (histogram.num_zero, histogram.num_nan, histogram.num_posinf, histogram.num_neginf)
        return cls(label, _name(histogram), first, counts, *beside)


def _dense(by_exponent: Mapping[int, int]) -> tuple[int, tuple[int, ...]]:
    """Return the lowest exponent and the counts from there to the highest."""
    exponents = range(min(by_exponent, default=0), max(by_exponent, default=-1) + 1)
    return exponents.start, tuple(by_exponent.get(exponent, 0) for exponent in exponents)


def _name(histogram: ExponentHistogram | StoredHistogram) -> str:
    return str(histogram.dtype).removeprefix("torch.")


def histogram_words(histogram: StoredHistogram) -> str:
    """Return how many elements there are, and how many of them are zero, subnormal, nan or inf."""
    normal = first_normal(histogram.dtype)
    num_inf = histogram.num_posinf + histogram.num_neginf
    beside = (
        (histogram.num_zero, "zero"),
        (
            sum(num for exponent, num in enumerate(histogram.counts, histogram.first) if exponent < normal),
            "subnormal",
        ),
        (histogram.num_nan, "nan"),
        (num_inf, "inf"),
    )
    numel = sum(histogram.counts) + histogram.num_zero + histogram.num_nan + num_inf
    return ", ".join(
        [f"{numel} elements of {histogram.dtype}", *(f"{num} {what}" for num, what in beside if num)]
    )


def first_normal(dtype: str) -> float:
    """Return the power of two from which on numbers are normal. All integers are."""
    ends = limits(dtype)
    return -inf if ends is None else floor_log2(ends.smallest_normal)
