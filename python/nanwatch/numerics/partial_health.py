"""Health and fingerprint of a tensor that is read part by part, such as one in a file that is larger than memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

from torch import Tensor

from . import _extension
from ._fingerprint import BLOCK as BLOCK
from ._fingerprint import sealed
from .formats import TensorHealth
from .ranges import health_of

_EMPTY = (inf, 0.0, 1.0, inf, 0.0, 0, 0, 0, 0, 0, -1)  # the row of a tensor without elements


class PartialHealth:
    """Sum of the parts that were read so far. Each thread has its own, and one of them merges the others.

    Examples:
        >>> import nanwatch, torch
        >>> from nanwatch.numerics.partial_health import PartialHealth
        >>> x, parts = torch.arange(1024.0), PartialHealth()
        >>> for start in (512, 0):
        ...     parts.add(x[start : start + 512], start)
        >>> parts.fingerprint("float32", x.shape) == nanwatch.fingerprint(x), parts.health(x.shape).num_zero
        (True, 1)
    """

    __slots__ = ("_blocks", "_row")

    def __init__(self, row: Sequence[float] = _EMPTY, start: int = 0) -> None:
        """Begin with a part whose row of `torch.ops.nanwatch.health` is known, from element `start` on."""
        self._row: Sequence[float] = _EMPTY
        self._blocks = 0
        self._add(row, start, 0)

    def add(self, x: Tensor, start: int, *, fingerprints: bool = True) -> None:
        """Read a part that begins at element `start` of the tensor, in C order, and at a whole number of BLOCK bytes.

        The calling thread reads it alone; without `fingerprints` only if it has less than 384 KiB, but three times as
        fast.
        """
        if fingerprints:
            row, blocks = _extension.part_health(x, start * x.element_size() // BLOCK)
        else:
            row, blocks = _extension.health(x), 0
        self._add(row.tolist(), start, int(blocks))

    def _add(self, row: Sequence[float], start: int, blocks: int) -> None:
        if start and row[-1] >= 0:
            row = [*row[:-1], row[-1] + start]
        self._row = row if self._row is _EMPTY else _together(self._row, row)
        self._blocks += blocks

    def merge(self, other: PartialHealth) -> None:
        """Add the parts that another one has read."""
        self._add(other._row, 0, other._blocks)

    def health(self, shape: Sequence[int]) -> TensorHealth:
        """Return the health of the tensor, whose parts have all been read."""
        return health_of(self._row, shape)

    def fingerprint(self, dtype_name: str, shape: Sequence[int]) -> int:
        """Return `nanwatch.fingerprint` of the tensor, whose parts have all been read."""
        return sealed(self._blocks, dtype_name, shape)


def _together(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return the row of two parts."""
    low, high = min(a[3], b[3]), max(a[4], b[4])
    counts = [one + other for one, other in zip(a[5:10], b[5:10], strict=True)]
    nans, posinfs, neginfs, *_ = counts
    first = min((one for one in (a[10], b[10]) if one >= 0), default=-1)
    ends = (nan, nan) if nans else (low, inf if posinfs or neginfs else high)
    return [*ends, first < 0, low, high, *counts, first]
