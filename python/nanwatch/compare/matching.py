"""Search for the calls of two runs that compute the same.

Names come first, then weights (equal in both, or side by side in a fused projection). The aligner of traces matches the
rest between these, in the order of execution: by class, by the shape of the weight, by name, and by values. Containers
match by what they hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..trace.align import align_calls
from ..util.visible import without_wrappers
from .calls import CallPair, ModuleCall, is_sum
from .tensors import KeptTensor, Tokens, errors_between, total
from .words import weight_of

_PROJECTIONS = 8
# Weights in bfloat16 are within 0.4 % of those in float32.
SAME_WEIGHT = 0.02
# Containers of which less is alike, by the matched calls inside, are not the same.
_LEAST_SHARE = 0.5
# Values that close are those of one tensor, with a fault or without.
_NEAR = 0.1


class Marks(Protocol):
    """What tells the weights of calls from each other."""

    def of(self, call: ModuleCall) -> Any:
        """Return the mark of the call's weight, or None."""

    def order(self, marks: Sequence[Any], whole: Any) -> Sequence[int]:
        """Return the order in which some of the marks make up a whole one, or nothing."""


def match_calls(
    a: Sequence[ModuleCall], b: Sequence[ModuleCall], tokens: Tokens, marks: Marks | None = None
) -> list[CallPair]:
    """Return the pairs of calls that compute the same, in the order of A."""
    matcher = _Matcher(a, b, tokens, RowMarks() if marks is None else marks)
    return matcher.match()


class _Matcher:
    """Search over two lists of calls."""

    def __init__(
        self, a: Sequence[ModuleCall], b: Sequence[ModuleCall], tokens: Tokens, marks: Marks
    ) -> None:
        self._sides = (a, b)
        self._tokens = tokens
        self._marker = marks
        self._sizes = {call: {tokens.size(kept) for kept in call.outputs} for call in (*a, *b)}
        self._free = {*a, *b}
        self._pairs: list[CallPair] = []

    def match(self) -> list[CallPair]:
        """Return the pairs."""
        inner_a, inner_b = ([call for call in side if call.parent is not None] for side in self._sides)
        self._align(inner_a, inner_b, [lambda call: without_wrappers(call.path)])
        self._match_weights()
        # Unmatched calls have no equal on the first level, so matched ones stay where they are.
        anchors: dict[ModuleCall, object] = {}
        for number, pair in enumerate(self._pairs):
            anchors |= dict.fromkeys((*pair.a[:1], *pair.b[:1]), number)
        leaves_a, leaves_b = ([call for call in side if call.is_leaf] for side in (inner_a, inner_b))
        levels: list[Callable[[ModuleCall], object]] = [
            lambda call: anchors.get(call, call),
            lambda call: (call.class_name, *sorted(self._sizes[call])),
            # A new norm: matrices that are one would have been matched.
            lambda call: (
                (call.weight_shape, *sorted(self._sizes[call])) if len(call.weight_shape) == 1 else call
            ),
            lambda call: (call.path.rpartition(".")[2], *sorted(self._sizes[call])),
        ]
        self._align(
            leaves_a,
            leaves_b,
            levels,
            lambda a, b: not (_may_hold(a) or _may_hold(b)) and self._are_near(a, b),
        )
        self._match_containers(inner_a, inner_b)
        roots = [next((call for call in side if call.parent is None), None) for side in self._sides]
        if roots[0] is not None and roots[1] is not None:
            self._add((roots[0],), (roots[1],))
        return sorted(self._pairs, key=lambda pair: pair.a[0].start)

    def _add(self, a: tuple[ModuleCall, ...], b: tuple[ModuleCall, ...]) -> None:
        self._pairs.append(CallPair(a, b))
        self._free.difference_update(a, b)

    def _left(self, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
        return [call for call in calls if call in self._free]

    def _fit(self, a: ModuleCall, b: ModuleCall) -> bool:
        return {a, b} <= self._free and not self._sizes[a].isdisjoint(self._sizes[b])

    def _align(
        self,
        calls_a: Sequence[ModuleCall],
        calls_b: Sequence[ModuleCall],
        levels: Sequence[Callable[[ModuleCall], object]],
        fits: Callable[[ModuleCall, ModuleCall], bool] | None = None,
    ) -> None:
        keys: Any = [([key(call) for call in calls_a], [key(call) for call in calls_b]) for key in levels]
        is_pair = None if fits is None else (lambda i, j: fits(calls_a[i], calls_b[j]))
        for i, j in align_calls(keys, is_pair):
            if self._fit(calls_a[i], calls_b[j]):
                self._add((calls_a[i],), (calls_b[j],))

    def _match_weights(self) -> None:
        """Match each call to the first one with the same weight, then to several that make up its weight."""
        marks: list[dict[ModuleCall, Any]] = []
        for side in self._sides:
            inner = (call for call in self._left(side) if call.is_leaf and call.parent is not None)
            marked = ((call, self._marker.of(call)) for call in inner)
            marks.append({call: mark for call, mark in marked if mark is not None})
        for call_a, mark_a in marks[0].items():
            same = (
                call_b
                for call_b, mark_b in marks[1].items()
                if self._fit(call_a, call_b) and self._marker.order([mark_a], mark_b)
            )
            if (call_b := next(same, None)) is not None:
                self._add((call_a,), (call_b,))
        for number, other in ((0, 1), (1, 0)):
            groups: dict[object, list[ModuleCall]] = defaultdict(list)
            for call in self._left(list(marks[number])):
                if call.inputs:
                    groups[call.inputs[0].identity].append(call)
            for whole in self._left(list(marks[other])):
                for group in map(self._left, groups.values()):
                    parts = [marks[number][call] for call in group]
                    order = self._marker.order(parts, marks[other][whole])
                    if len(order) > 1:
                        ordered = tuple(group[i] for i in order)
                        self._add(*((ordered, (whole,)) if number == 0 else ((whole,), ordered)))
                        break

    def _are_near(self, a: ModuleCall, b: ModuleCall, kind: str = "outputs") -> bool:
        """Return whether the first inputs or outputs are nearly the same."""
        pairs = (
            self._tokens.pair(x, y)
            for x in _first_and_sum(getattr(a, kind))
            for y in _first_and_sum(getattr(b, kind))
        )
        return any(rows is not None and errors_between(*rows).total < _NEAR for rows in pairs)

    def _match_containers(self, inner_a: Sequence[ModuleCall], inner_b: Sequence[ModuleCall]) -> None:
        pairs = [pair for pair in self._pairs if pair.is_leaf]
        held: dict[ModuleCall, frozenset[int]] = {}
        sides = [list(filter(_may_hold, self._left(side))) for side in (inner_a, inner_b)]
        for number, calls in enumerate(sides):
            for call in calls:
                inside = (i for i, pair in enumerate(pairs) if call.holds(pair.sides[number][0]))
                held[call] = frozenset(inside)

        def alike(a: ModuleCall, b: ModuleCall) -> bool:
            both = held[a] & held[b]
            if a.is_leaf != b.is_leaf:  # what a compiled one calls does not show
                return self._are_near(a, b, "inputs")
            return len(both) >= _LEAST_SHARE * max(len(held[a] | held[b]), 1) and bool(both)

        self._align(sides[0], sides[1], [lambda call: held[call] or call], alike)


def _first_and_sum(values: Sequence[KeptTensor]) -> list[KeptTensor]:
    return [*values[:1], *([total(values[:2])] if is_sum(values) else [])]


def _may_hold(call: ModuleCall) -> bool:
    return not call.is_leaf or (call.module is not None and bool(call.module._modules))


class RowMarks:
    """Marks of weights that are there: projections of each row."""

    def of(self, call: ModuleCall) -> Tensor | None:
        """Return the marks of the call's weight, one for each row."""
        weight = weight_of(call.module)
        return None if weight is None else row_marks(weight)

    def order(self, marks: Sequence[Tensor], whole: Tensor) -> list[int]:
        """Return the order in which the whole weight has the rows of others, or nothing."""
        order: list[int] = []
        at = 0
        while at < len(whole):
            left = (i for i in range(len(marks)) if i not in order)
            part = next((i for i in left if same_marks(marks[i], whole[at : at + len(marks[i])])), None)
            if part is None:
                return []
            order.append(part)
            at += len(marks[part])
        return order


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
