"""How the elements of one tensor spread over the powers of two: an exponent histogram as a report keeps it.

Plain numbers, no torch: a report is read where there may be none.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..numerics.formats import floor_log2, limits

_MOST = 2**63


@dataclass(frozen=True, slots=True)
class Spread:
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
