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
    """Sum of the parts that were read so far, in their order.

    Examples:
        >>> import nanwatch, torch
        >>> from nanwatch.numerics.partial_health import PartialHealth
        >>> x, parts = torch.arange(4096.0), PartialHealth()
        >>> for start in (0, 2048):
        ...     parts.add(x[start : start + 2048], start)
        ...     parts.add_bits(x[start : start + 2048])
        >>> parts.fingerprint("float32", x.shape) == nanwatch.fingerprint(x), parts.health(x.shape).num_zero
        (True, 1)
    """

    __slots__ = ("_row", "_sums")

    def __init__(self) -> None:
        self._row: Sequence[float] = _EMPTY
        self._sums = [torch.zeros(0, dtype=torch.int64)]

    def add(self, x: Tensor, start: int) -> None:
        """Read the health of a part that begins at element `start` of the tensor, in C order."""
        row = _extension.health(x).tolist()
        if row[-1] >= 0:
            row[-1] += start
        self._row = row if self._row is _EMPTY else _together(self._row, row)

    def add_bits(self, x: Tensor) -> None:
        """Read the fingerprint of a part. All parts but the last are multiples of BLOCK bytes."""
        self._sums.append(block_sums(x))

    def health(self, shape: Sequence[int]) -> TensorHealth:
        """Return the health of the tensor, whose parts have all been read."""
        return health_of(self._row, shape)

    def fingerprint(self, dtype_name: str, shape: Sequence[int]) -> int:
        """Return `nanwatch.fingerprint` of the tensor, whose parts have all been read."""
        return sealed(torch.cat(self._sums), dtype_name, shape)


def _together(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return the row of two parts."""
    low, high = min(a[3], b[3]), max(a[4], b[4])
    counts = [x + y for x, y in zip(a[5:10], b[5:10], strict=True)]
    nans, posinfs, neginfs, *_ = counts
    first = min((index for index in (a[10], b[10]) if index >= 0), default=-1)
    ends = (nan, nan) if nans else (low, inf if posinfs or neginfs else high)
    return [*ends, first < 0, low, high, *counts, first]
