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

_NAN, _POSINF, _NEGINF = range(3)


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

    __slots__ = ("_blocks", "_counts", "_first", "_high", "_low")

    def __init__(self) -> None:
        self._low, self._high = inf, 0.0
        self._counts = [0] * 5
        self._first = -1
        self._blocks = 0

    def add(self, x: Tensor, start: int, *, fingerprints: bool = True) -> None:
        """Read a part that begins at element `start` of the tensor, in C order, and at a whole number of BLOCK bytes.

        The calling thread reads it alone; without `fingerprints` only if it has less than 384 KiB, but three times as
        fast.
        """
        if fingerprints:
            row, blocks = _extension.part_health(x, start * x.element_size() // BLOCK)
        else:
            row, blocks = _extension.health(x), 0
        self.add_row(row.tolist(), start, int(blocks))

    def add_row(self, row: Sequence[float], start: int, blocks: int = 0) -> None:
        """Add a part whose row of `torch.ops.nanwatch.health` is known."""
        _, _, _, low, high, *counts, first = row
        self._add(low, high, [int(n) for n in counts], int(first) + start if first >= 0 else -1, blocks)

    def merge(self, other: PartialHealth) -> None:
        """Add the parts that another one has read."""
        self._add(other._low, other._high, other._counts, other._first, other._blocks)

    def _add(self, low: float, high: float, counts: Sequence[int], first: int, blocks: int) -> None:
        self._low, self._high = min(self._low, low), max(self._high, high)
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
        if first >= 0 and (self._first < 0 or first < self._first):
            self._first = first
        self._blocks += blocks

    def health(self, shape: Sequence[int]) -> TensorHealth:
        """Return the health of the tensor, whose parts have all been read."""
        low, high = self._low, self._high
        counts = self._counts
        if counts[_NAN]:
            low = high = nan
        elif counts[_POSINF] or counts[_NEGINF]:
            high = inf
        is_finite = self._first < 0
        return health_of([low, high, is_finite, self._low, self._high, *counts, self._first], shape)

    def fingerprint(self, dtype_name: str, shape: Sequence[int]) -> int:
        """Return `nanwatch.fingerprint` of the tensor, whose parts have all been read."""
        return sealed(self._blocks, dtype_name, shape)
