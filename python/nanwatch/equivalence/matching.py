"""Search for the calls of two runs that compute the same.

Names come first, then weights (equal in both, or side by side in a fused projection). What is left is aligned in the
order of execution, by class, name, place between the matched calls, and values. Containers match by what they hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..trace.align import align_calls
from ..util.visible import without_wrappers
from .calls import CallPair, ModuleCall, is_sum
from .differences import Tokens, sketches, weight_of

_PROJECTIONS = 8
# Weights in bfloat16 are within 0.4 % of those in float32.
SAME_WEIGHT = 0.02
# A match by score alone needs more than a place between the same neighbours, which have 4.
_LEAST_SCORE = 5.0
# Containers of which less is alike, by the matched calls inside, are not the same.
_LEAST_SHARE = 0.5
# Values that close are those of one tensor, with a fault or without.
_NEAR = 0.9


class CallMatcher:
    """Search for the calls of two runs that compute the same."""

    def __init__(self, a: Sequence[ModuleCall], b: Sequence[ModuleCall], tokens: Tokens) -> None:
        self._a, self._b = a, b
        self._tokens = tokens
        self._sizes = {one: {tokens.size(kept) for kept in one.outputs} for one in (*a, *b)}
        self._free = {*a, *b}
        self._marks: dict[ModuleCall, Tensor] = {}
        self.pairs: list[CallPair] = []

    def match(self) -> list[CallPair]:
        """Return the pairs in the order of the calls of `a`."""
        self._match_names()
        leaves_left = [one for one in self._free if one.is_leaf]
        self._marks = {one: mark for one in leaves_left if (mark := _marks(one)) is not None}
        self._match_weights()
        for order, fused in self._fused(self._a, self._b):
            self._add(order, (fused,))
        for order, fused in self._fused(self._b, self._a):
            self._add((fused,), order)
        self._match_rest()
        return sorted(self.pairs, key=lambda pair: pair.a[0].start)

    def _add(self, a: tuple[ModuleCall, ...], b: tuple[ModuleCall, ...]) -> None:
        self.pairs.append(CallPair(a, b))
        self._free.difference_update(a, b)

    def _left(self, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
        return [one for one in calls if one in self._free]

    def _fit(self, a: ModuleCall, b: ModuleCall) -> bool:
        return b in self._free and not self._sizes[a].isdisjoint(self._sizes[b])

    def _match_names(self) -> None:
        """Match calls of modules of one name, in their order."""
        sides = [[one for one in calls if one.parent is not None] for calls in (self._a, self._b)]
        names_a, names_b = ([without_wrappers(one.path) for one in side] for side in sides)
        for i, j in align_calls([(names_a, names_b)]):
            if self._fit(sides[0][i], sides[1][j]):
                self._add((sides[0][i],), (sides[1][j],))

    def _match_weights(self) -> None:
        """Match each call to the first one with the same weight."""
        left = self._left(self._b)
        for one in self._left(self._a):
            same = (b for b in left if self._fit(one, b) and self._have_same_weight(one, b))
            if (match := next(same, None)) is not None:
                self._add((one,), (match,))

    def _have_same_weight(self, a: ModuleCall, b: ModuleCall) -> bool:
        return a in self._marks and b in self._marks and same_marks(self._marks[a], self._marks[b])

    def _fused(
        self, ones: Sequence[ModuleCall], others: Sequence[ModuleCall]
    ) -> Iterator[tuple[tuple[ModuleCall, ...], ModuleCall]]:
        """Yield calls with one input, and the call on the other side whose weight has all their rows."""
        groups: dict[int, list[ModuleCall]] = defaultdict(list)
        for one in self._left(ones):
            if one in self._marks and one.inputs:
                groups[id(one.inputs[0])].append(one)
        for other in self._left(others):
            for group in groups.values() if other in self._marks else ():
                order = self._order(group, self._marks[other]) if self._free.issuperset(group) else ()
                if len(order) > 1:
                    yield order, other
                    break

    def _order(self, group: list[ModuleCall], whole: Tensor) -> tuple[ModuleCall, ...]:
        """Return the calls in the order in which the fused weight has them, or nothing."""
        found: list[ModuleCall] = []
        at = 0
        while at < len(whole):
            left = ((one, self._marks[one]) for one in group if one not in found)
            fits = (one for one, mark in left if same_marks(mark, whole[at : at + len(mark)]))
            if (one := next(fits, None)) is None:
                return ()
            found.append(one)
            at += len(self._marks[one])
        return tuple(found)

    def _match_rest(self) -> None:
        """Align what is left in the order of execution, by the best total score."""
        left_a, left_b = self._left(self._a), self._left(self._b)
        if not left_a or not left_b:
            return
        scores = self._scores(left_a, left_b)
        rows, columns = scores.shape
        best = np.zeros((rows + 1, columns + 1))
        for i in range(rows):
            best[i + 1, 1:] = np.maximum(best[i, 1:], best[i, :-1] + scores[i])
            best[i + 1] = np.maximum.accumulate(best[i + 1])
        i, j = rows, columns
        while i and j:
            if best[i, j] == best[i - 1, j]:
                i -= 1
            elif best[i, j] == best[i, j - 1]:
                j -= 1
            else:
                i, j = i - 1, j - 1
                self._add((left_a[i],), (left_b[j],))

    def _scores(self, a: list[ModuleCall], b: list[ModuleCall]) -> np.ndarray[Any, Any]:
        firsts = [(pair.a[0], pair.b[0]) for pair in self.pairs if pair.a[0].is_leaf]
        ends_a, ends_b = (np.array([pair[side].end for pair in firsts]) for side in (0, 1))
        around_a, around_b = (
            [
                (
                    frozenset(np.flatnonzero((ends > one.start) & (ends < one.end)).tolist()),
                    _neighbours(ends, one),
                )
                for one in calls
            ]
            for ends, calls in ((ends_a, a), (ends_b, b))
        )
        values_a, values_b = ([self._values(one) for one in calls] for calls in (a, b))
        scores = np.zeros((len(a), len(b)))
        for i, one in enumerate(a):
            for j, other in enumerate(b):
                if (one.parent is None) != (other.parent is None):
                    continue
                if one.parent is None:
                    scores[i, j] = 100.0
                elif self._fit(one, other):
                    score = _score(one, other, around_a[i], around_b[j], values_a[i], values_b[j])
                    scores[i, j] = score if score >= _LEAST_SCORE else 0.0
        return scores

    def _values(self, call: ModuleCall) -> list[list[Tensor]]:
        """Return sketches of the first input, and of the first output, each as one vector; and those of sums."""
        found: list[list[Tensor]] = []
        for values in (call.inputs, call.outputs):
            vectors = []
            for kept in values[: 2 if is_sum(values) else 1]:
                rows = self._tokens.rows(kept)
                rows = (rows if kept.is_sketch else sketches(rows)).to(torch.float64).nan_to_num()
                vectors.append(sketches(rows.t()).flatten())
            found.append([*vectors[:1], *([vectors[0] + vectors[1]] if len(vectors) > 1 else [])])
        return found


def _marks(call: ModuleCall) -> Tensor | None:
    """Return the marks of the call's weight."""
    weight = weight_of(call.module)
    return None if weight is None else row_marks(weight)


def row_marks(weight: Tensor) -> Tensor | None:
    """Return projections (rows, 8) of each row of a weight, None for a weight that is one number throughout."""
    rows = weight.flatten(1) if weight.ndim > 1 else weight[:, None]
    rows = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    if float(rows.max() - rows.min()) == 0.0:
        return None
    generator = torch.Generator().manual_seed(rows.shape[-1])
    projection = torch.randn(rows.shape[-1], _PROJECTIONS, generator=generator)
    return (rows @ projection.to(rows)).to("cpu", torch.float32)


def same_marks(a: Tensor, b: Tensor, tolerance: float = SAME_WEIGHT) -> bool:
    """Return whether marks are those of one weight, perhaps in another format."""
    return a.shape == b.shape and float((a - b).norm()) <= tolerance * float(a.norm())


def _neighbours(ends: np.ndarray[Any, Any], call: ModuleCall) -> tuple[int, int]:
    """Return the matched calls that end last before this one and first after it, by number."""
    if not len(ends):
        return -1, -1
    before, after = np.where(ends < call.start, ends, -1), np.where(ends > call.end, ends, 1 << 40)
    return (
        int(before.argmax()) if before.max() >= 0 else -1,
        int(after.argmin()) if after.min() < 1 << 40 else -1,
    )


def _close(ones: list[Tensor], others: list[Tensor]) -> float:
    pairs = [(a, b) for a in ones for b in others if a.shape == b.shape and a.any()]
    return max((1.0 - float((a - b).norm() / a.norm()) for a, b in pairs), default=0.0)


def _score(a: ModuleCall, b: ModuleCall, around_a: Any, around_b: Any, values_a: Any, values_b: Any) -> float:
    """Return how much speaks for two calls being the same, or 0 where something speaks against it."""
    (inside_a, (before_a, after_a)), (inside_b, (before_b, after_b)) = around_a, around_b
    share = len(inside_a & inside_b) / max(len(inside_a | inside_b), 1)
    if (inside_a or inside_b) and share < _LEAST_SHARE:
        return 0.0
    is_alike = a.class_name == b.class_name or a.weight_shape == b.weight_shape != ()
    is_named = a.path.rpartition(".")[2] == b.path.rpartition(".")[2]
    near = _close(values_a[1], values_b[1])
    if a.is_leaf and b.is_leaf and not (is_alike or is_named or near > _NEAR):
        return 0.0
    score: float = 3.0 * is_alike + 2.0 * is_named + 2.0 * (before_a == before_b) + 2.0 * (after_a == after_b)
    return score + 4.0 * share + 3.0 * max(0.0, near) + 2.0 * max(0.0, _close(values_a[0], values_b[0]))
