"""Search for the tensors of two checkpoints that are one.

Names come first, without those of wrappers. What is left is matched by its values, as `nanwatch compare` matches the
weights of two implementations: by projections of rows, as they are, transposed, or side by side in a fused projection.
Here only the first, the middle and the last row are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..equivalence.matching import SAME_WEIGHT, row_marks, same_marks
from ..util.visible import without_wrappers
from .encodings import ENCODINGS, is_float
from .stored import DamagedError, OpenFiles, StoredTensor, transposed
from .streaming import Streamer

_LONGEST = 1 << 16  # elements of a row that are read
_OF_VECTOR = 64
_NEAREST = 4
TOLERANCES = {"q4_0": 0.2}
"""Relative error of an encoding; others stay within that of `nanwatch compare`."""


def tolerance_of(*tensors: StoredTensor) -> float:
    """Return how far values may be apart that are one tensor's."""
    return max(TOLERANCES.get(one.dtype, SAME_WEIGHT) for one in tensors)


class Pair(NamedTuple):
    """Tensors that are one: several on one side are the parts of the one on the other, by their first dimension."""

    a: tuple[StoredTensor, ...]
    b: tuple[StoredTensor, ...]
    turned: bool = False
    """Whether the second lies transposed."""


class Pairing:
    """Search over two lists of tensors, all of which can be read."""

    def __init__(self, a: Sequence[StoredTensor], b: Sequence[StoredTensor], files: OpenFiles) -> None:
        self._left = {id(one) for one in (*a, *b)}
        self._a, self._b = a, b
        self._streamer = Streamer(files, 1 << 10)
        self._marks: dict[tuple[StoredTensor, int, int], Tensor | None] = {}
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
        for turned in (False, True):
            for parts, whole in self._search(self._a, self._b, turned):
                self._add(parts, (whole,), turned)
        for parts, whole in self._search(self._b, self._a, turned=False):
            self._add((whole,), parts)
        return self.pairs

    def _add(self, a: tuple[StoredTensor, ...], b: tuple[StoredTensor, ...], turned: bool = False) -> None:
        self.pairs.append(Pair(a, b, turned))
        self._left.difference_update(map(id, (*a, *b)))

    def _free(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return [one for one in tensors if id(one) in self._left and one.numel > 1 and is_float(one.dtype)]

    def _search(
        self, ones: Sequence[StoredTensor], wholes: Sequence[StoredTensor], turned: bool
    ) -> Iterator[tuple[tuple[StoredTensor, ...], StoredTensor]]:
        """Yield one of `wholes` with those of `ones` that lie in it one below the other, or with the one that it is."""
        groups: dict[tuple[int, ...], dict[int, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
        for one in self._free(ones):
            if self._mark(one, 0, one.lying[0]) is not None:
                groups[one.lying[1:]][one.lying[0]].append(one)
        for whole in self._free(wholes):
            if turned and (len(whole.shape) != 2 or whole.dtype in ENCODINGS):
                continue
            seen = transposed(whole) if turned else whole
            rows, by_rows = seen.lying[0], groups.get(seen.lying[1:], {})
            found: list[StoredTensor] = []
            at = 0
            # The largest first, so that one is the whole before several are. Of a transposed one no part is looked for.
            sizes = sorted((n for n in by_rows if n == rows or not turned), reverse=True)
            while at < rows:
                fits = (
                    one
                    for n in sizes
                    if at + n <= rows
                    for one in self._nearest(by_rows[n], seen, at)
                    if one not in found and one.dtype == (*found, one)[0].dtype and self._same(one, seen, at)
                )
                if (part := next(fits, None)) is None:
                    break
                found.append(part)
                at += part.lying[0]
            if at == rows:
                yield tuple(found), whole

    def _nearest(self, ones: Sequence[StoredTensor], whole: StoredTensor, at: int) -> list[StoredTensor]:
        """Return those of `ones`, which have one shape, whose first row is nearest to row `at`."""
        free = [one for one in ones if id(one) in self._left]
        mark = self._mark(whole, at, at + ones[0].lying[0])
        marks = [first for one in free if (first := self._mark(one, 0, one.lying[0])) is not None]
        if mark is None or not marks:
            return []
        near = (torch.cat(marks) - mark).norm(dim=1)
        return [free[i] for i in near.argsort()[:_NEAREST].tolist()]

    def _same(self, one: StoredTensor, whole: StoredTensor, at: int) -> bool:
        """Return whether the first, the middle and the last row of `one` are those of `whole` from row `at` on."""
        rows, tolerance = one.lying[0], tolerance_of(one, whole)
        for row in sorted({0, rows // 2, rows - 1}):
            mark, other = self._mark(one, row, rows), self._mark(whole, at + row, at + rows)
            if mark is None or other is None:
                if row == 0 or (mark is None) != (other is None):
                    return False
            elif not same_marks(mark, other, 2 * tolerance if tolerance > SAME_WEIGHT else tolerance):
                return False
        return True

    def _mark(self, tensor: StoredTensor, row: int, end: int) -> Tensor | None:
        """Return the mark of a row; of a vector that of some elements before `end`."""
        is_vector = len(tensor.shape) == 1
        key = tensor, row, end if is_vector else 0
        if key not in self._marks:
            width = tensor.numel // tensor.lying[0]
            begin, count = row * width, min(_OF_VECTOR, end - row) if is_vector else min(width, _LONGEST)
            self._marks[key] = None
            if not (is_vector and tensor.dtype in ENCODINGS):
                with suppress(DamagedError, OSError):
                    values = self._streamer.values(tensor, begin, count)
                    self._marks[key] = row_marks(values[None].to(torch.float32))
        return self._marks[key]
