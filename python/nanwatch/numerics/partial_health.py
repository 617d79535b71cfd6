"""Health and fingerprint of a tensor that is read part by part, such as one in a file that is larger than memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import torch
from torch import Tensor

from . import _extension
from ._fingerprint import BLOCK as BLOCK
from ._fingerprint import block_sums, sealed
from .formats import TensorHealth
from .ranges import health_of

_EMPTY = (inf, 0.0, 1.0, inf, 0.0, 0, 0, 0, 0, 0, -1)  # the row of a tensor without elements


class PartialHealth:
    """Sum of the parts that were read so far. Each thread has its own, and one of them merges the others.

    Examples:
        >>> import nanwatch, torch
        >>> from nanwatch.numerics.partial_health import PartialHealth
        >>> x, parts = torch.arange(4096.0), PartialHealth()
        >>> for start in (2048, 0):
        ...     parts.add(x[start : start + 2048], start)
        ...     parts.add_bits(x[start : start + 2048], 4 * start)
        >>> parts.fingerprint("float32", x.shape) == nanwatch.fingerprint(x), parts.health(x.shape).num_zero
        (True, 1)
    """

    __slots__ = ("_row", "_sums")

    def __init__(self) -> None:
        self._row: Sequence[float] = _EMPTY
        self._sums: dict[int, Tensor] = {}

    def add(self, x: Tensor, start: int) -> None:
        """Read the health of a part that begins at element `start` of the tensor, in C order.

        The calling thread reads it alone if it has less than 384 KiB.
        """
        self._add(_extension.health(x).tolist(), start)

    def add_bits(self, x: Tensor, start: int) -> None:
        """Read the fingerprint of a part that begins at byte `start` of the tensor, a multiple of BLOCK."""
        self._sums[start] = block_sums(x)

    def _add(self, row: Sequence[float], start: int) -> None:
        if start and row[-1] >= 0:
            row = [*row[:-1], row[-1] + start]
        self._row = row if self._row is _EMPTY else _together(self._row, row)

    def merge(self, other: PartialHealth) -> None:
        """Add the parts that another one has read."""
        self._add(other._row, 0)
        self._sums |= other._sums

    def health(self, shape: Sequence[int]) -> TensorHealth:
        """Return the health of the tensor, whose parts have all been read."""
        return health_of(self._row, shape)

    def fingerprint(self, dtype_name: str, shape: Sequence[int]) -> int:
        """Return `nanwatch.fingerprint` of the tensor, whose parts have all been read."""
        sums = [torch.zeros(0, dtype=torch.int64), *(self._sums[start] for start in sorted(self._sums))]
        return sealed(torch.cat(sums), dtype_name, shape)


def _together(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return the row of two parts."""
    low, high = min(a[3], b[3]), max(a[4], b[4])
    counts = [one + other for one, other in zip(a[5:10], b[5:10], strict=True)]
    nans, posinfs, neginfs, *_ = counts
    first = min((one for one in (a[10], b[10]) if one >= 0), default=-1)
    ends = (nan, nan) if nans else (low, inf if posinfs or neginfs else high)
    return [*ends, first < 0, low, high, *counts, first]
