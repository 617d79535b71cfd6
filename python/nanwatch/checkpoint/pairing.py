"""Search for the tensors of two checkpoints that are one.

Names come first, without those of wrappers. What is left is matched by its values, as `nanwatch compare` matches the
weights of two implementations: by projections of rows, as they are, transposed, or side by side in a fused projection.
Here only the first, the middle and the last row are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..equivalence.matching import SAME_WEIGHT, row_marks, same_marks
from ..util.visible import without_wrappers
from .encodings import ENCODINGS, bytes_of, is_float
from .stored import DamagedError, OpenFiles, StoredTensor
from .streaming import Streamer

_LONGEST = 1 << 16  # elements of a row that are read
_OF_VECTOR = 64
TOLERANCES = {"q4_0": 0.2}
"""Relative error of an encoding; others stay within that of `nanwatch compare`."""


def tolerance_of(*tensors: StoredTensor) -> float:
    """Return how far values may be apart that are one tensor's."""
    return max(TOLERANCES.get(one.dtype, SAME_WEIGHT) for one in tensors)


class Pair(NamedTuple):
    """Tensors that are one: several on one side are the parts of the one on the other, by their first dimension."""

    a: tuple[StoredTensor, ...]
    b: tuple[StoredTensor, ...]
    transposed: bool = False


class Pairing:
    """Search over two lists of tensors, all of which can be read."""

    def __init__(self, a: Sequence[StoredTensor], b: Sequence[StoredTensor], files: OpenFiles) -> None:
        self._left = {id(one): one for one in (*a, *b)}
        self._a, self._b = a, b
        self._streamer = Streamer(files, 1 << 10)
        self._marks: dict[tuple[int, int, int, bool], Tensor | None] = {}
        self.pairs: list[Pair] = []

    def match(self) -> list[Pair]:
        """Return the pairs."""
        by_name = {without_wrappers(one.name): one for one in self._b}
        for one in self._a:
            other = by_name.get(without_wrappers(one.name))
            if other is not None and id(other) in self._left and one.numel == other.numel:
                alike = one.shape == other.shape
                if alike or one.shape == other.shape[::-1]:
                    # An order of dimensions is only known for one that is no C order, and matters for two alone.
                    self._add((one,), (other,), (not alike) ^ ((one.order is None) != (other.order is None)))
        self._match_values(transposed=False)
        self._match_values(transposed=True)
        self._match_fused(self._free(self._a), self._free(self._b), swapped=False)
        self._match_fused(self._free(self._b), self._free(self._a), swapped=True)
        return self.pairs

    def _add(
        self, a: tuple[StoredTensor, ...], b: tuple[StoredTensor, ...], transposed: bool = False
    ) -> None:
        self.pairs.append(Pair(a, b, transposed))
        for one in (*a, *b):
            del self._left[id(one)]

    def _free(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return [one for one in tensors if id(one) in self._left and one.numel > 1 and _is_float(one)]

    def _match_values(self, *, transposed: bool) -> None:
        groups: dict[tuple[int, ...], list[tuple[StoredTensor, Tensor]]] = defaultdict(list)
        left = self._free(self._a)
        shapes = {one.lying[::-1] if transposed else one.lying for one in left}
        for other in self._free(self._b):
            if (
                other.lying in shapes
                and (mark := self._mark(other, 0, other.lying[0], transposed)) is not None
            ):
                groups[other.lying].append((other, mark))
        for one in left:
            shape = one.lying
            if transposed and len(shape) != 2:
                continue
            group = groups.get(shape[::-1] if transposed else shape)
            mark = self._mark(one, 0, shape[0], False) if group else None
            if mark is None or not group:
                continue
            near = (torch.cat([mark_of for _, mark_of in group]) - mark).norm(dim=1)
            for i in near.argsort()[:4].tolist():
                other = group[i][0]
                if id(other) in self._left and self._same(one, other, 0, transposed):
                    self._add((one,), (other,), transposed)
                    break

    def _match_fused(self, parts: list[StoredTensor], wholes: list[StoredTensor], *, swapped: bool) -> None:
        groups: dict[tuple[int, ...], list[tuple[StoredTensor, Tensor]]] = defaultdict(list)
        for one in parts:
            if (mark := self._mark(one, 0, one.lying[0], False)) is not None:
                groups[one.lying[1:]].append((one, mark))
        for whole in wholes:
            found: list[StoredTensor] = []
            at, rows, group = 0, whole.lying[0], groups.get(whole.lying[1:], [])
            while at < rows:
                fits = (
                    one
                    for one, _ in group
                    if id(one) in self._left
                    and one not in found
                    and at + one.lying[0] <= rows
                    and self._same(one, whole, at, False)
                )
                if (part := next(fits, None)) is None:
                    break
                found.append(part)
                at += part.lying[0]
            if at == rows and len(found) > 1:
                self._add(*(((whole,), tuple(found)) if swapped else (tuple(found), (whole,))))

    def _same(self, one: StoredTensor, other: StoredTensor, at: int, transposed: bool) -> bool:
        """Return whether the first, the middle and the last row of `one` are those of `other` from row `at` on."""
        rows = one.lying[0]
        tolerance = tolerance_of(one, other)
        for row in (0,) if transposed else sorted({0, rows // 2, rows - 1}):
            mark, other_mark = (
                self._mark(one, row, rows, False),
                self._mark(other, at + row, at + rows, transposed),
            )
            if mark is None or other_mark is None:
                if row == 0 or (mark is None) != (other_mark is None):
                    return False
            elif not same_marks(mark, other_mark, 2 * tolerance if tolerance > SAME_WEIGHT else tolerance):
                return False
        return True

    def _mark(self, tensor: StoredTensor, row: int, end: int, transposed: bool) -> Tensor | None:
        """Return the mark of a row, or of a column; of a vector that of some elements before `end`."""
        key = (id(tensor), row, end if len(tensor.shape) == 1 else 0, transposed)
        if key not in self._marks:
            try:
                values = self._row(tensor, row, end, transposed)
                self._marks[key] = None if values is None else row_marks(values[None])
            except (DamagedError, OSError):
                self._marks[key] = None
        return self._marks[key]

    def _row(self, tensor: StoredTensor, row: int, end: int, transposed: bool) -> Tensor | None:
        shape = tensor.lying
        width = tensor.numel // shape[0]
        if transposed:
            if tensor.dtype in ENCODINGS or len(shape) != 2:
                return None
            places = range(row, min(shape[0], _LONGEST) * width, width)
            found = [self._values(tensor, at, 1) for at in places]
            return torch.cat(found)
        begin, count = row * width, min(width, _LONGEST)
        if len(shape) == 1:
            if tensor.dtype in ENCODINGS:
                return None
            begin, count = row, min(_OF_VECTOR, end - row)
        return self._values(tensor, begin, count)

    def _values(self, tensor: StoredTensor, begin: int, count: int) -> Tensor:
        values = self._streamer.read(
            tensor, bytes_of(tensor.dtype, begin), bytes_of(tensor.dtype, count)
        ).values
        assert values is not None
        return values.to(torch.float32, copy=True)


def _is_float(tensor: StoredTensor) -> bool:
    return is_float(tensor.dtype) and (
        tensor.dtype not in ENCODINGS or ENCODINGS[tensor.dtype].decode is not None
    )
