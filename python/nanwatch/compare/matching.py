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
from ..trace.result import errors_between
from ..util.visible import without_wrappers
from .calls import SUM, CallPair, ModuleCall, value
from .tensors import KeptTensor, Tokens
from .words import weight_of

_PROJECTIONS = 8
# Weights in bfloat16 are within 0.4 % of those in float32.
_SAME_WEIGHT = 0.02
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


class RowMarks:
    """Marks of weights that are there: projections of each row. Equal rows of two weights have nearly equal ones."""

    def of(self, call: ModuleCall) -> Tensor | None:
        """Return the marks (rows, 8) of the call's weight, None for one number throughout."""
        weight = weight_of(call.module)
        if weight is None:
            return None
        rows = weight.flatten(1) if weight.ndim > 1 else weight[:, None]
        rows = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
        if float(rows.max() - rows.min()) == 0.0:
            return None
        generator = torch.Generator().manual_seed(rows.shape[-1])
        projection = torch.randn(rows.shape[-1], _PROJECTIONS, generator=generator)
        return (rows @ projection.to(rows)).to("cpu", torch.float32)

    def order(self, marks: Sequence[Tensor], whole: Tensor) -> list[int]:
        """Return the order in which the whole weight has the rows of others, or nothing."""
        order: list[int] = []
        at = 0
        while at < len(whole):
            left = (i for i in range(len(marks)) if i not in order)
            part = next((i for i in left if _are_alike(marks[i], whole[at : at + len(marks[i])])), None)
            if part is None:
                return []
            order.append(part)
            at += len(marks[part])
        return order


def match_calls(
    a: Sequence[ModuleCall], b: Sequence[ModuleCall], tokens: Tokens, marks: Marks | None = None
) -> list[CallPair]:
    """Return the pairs of calls that compute the same, in the order of A."""
    return _Matcher(a, b, tokens, marks or RowMarks()).match()


class _Matcher:
    """Search over two lists of calls."""

    def __init__(
        self, a: Sequence[ModuleCall], b: Sequence[ModuleCall], tokens: Tokens, marks: Marks
    ) -> None:
        self._sides = (a, b)
        self._tokens = tokens
        self._marks = marks
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
        levels: list[Callable[[ModuleCall], object]] = [
            lambda call: anchors.get(call, call),
            lambda call: (call.class_name, *sorted(self._sizes[call])),
            # A new norm: matrices that are one would have been matched.
            lambda call: (
                (call.weight_shape, *sorted(self._sizes[call])) if len(call.weight_shape) == 1 else call
            ),
            lambda call: (call.path.rpartition(".")[2], *sorted(self._sizes[call])),
        ]
        leaves_a, leaves_b = ([call for call in side if call.is_leaf] for side in (inner_a, inner_b))
        self._align(leaves_a, leaves_b, levels, self._are_near)
        self._match_containers(inner_a, inner_b)
        roots = [next((call for call in side if call.parent is None), None) for side in self._sides]
        if roots[0] is not None and roots[1] is not None:
            self._add((roots[0],), (roots[1],))
        return sorted(self._pairs, key=lambda pair: pair.a[0].start)

    def _add(self, a: tuple[ModuleCall, ...], b: tuple[ModuleCall, ...]) -> None:
        self._pairs.append(CallPair(a, b))
        self._free.difference_update(a, b)

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
            inner = [call for call in side if call in self._free and call.is_leaf and call.parent is not None]
            marked = ((call, self._marks.of(call)) for call in inner)
            marks.append({call: mark for call, mark in marked if mark is not None})
        for call_a, mark in marks[0].items():
            alike = (call for call, whole in marks[1].items() if self._marks.order([mark], whole))
            call_b = next((call for call in alike if self._fit(call_a, call)), None)
            if call_b is not None:
                self._add((call_a,), (call_b,))
        for number in (0, 1):
            groups: dict[object, list[ModuleCall]] = defaultdict(list)
            for call in marks[number]:
                if call in self._free and call.inputs:
                    groups[call.inputs[0].identity].append(call)
            for whole, mark in marks[1 - number].items():
                for group in groups.values() if whole in self._free else ():
                    parts = [call for call in group if call in self._free]
                    order = self._marks.order([marks[number][call] for call in parts], mark)
                    if len(order) > 1:
                        ordered = tuple(parts[i] for i in order)
                        self._add(*((ordered, (whole,)) if number == 0 else ((whole,), ordered)))
                        break

    def _are_near(self, a: ModuleCall, b: ModuleCall) -> bool:
        """Return whether the first outputs are nearly the same."""
        if any(call.module is not None and call.module._modules for call in (a, b)):
            return False  # compiled containers, whose parts make no calls
        pairs = (self._tokens.pair(x, y) for x in _first_and_sum(a) for y in _first_and_sum(b))
        return any(rows is not None and errors_between(*rows).total < _NEAR for rows in pairs)

    def _match_containers(self, inner_a: Sequence[ModuleCall], inner_b: Sequence[ModuleCall]) -> None:
        """Match each container to the free one with the largest share of matched calls inside in common."""
        pairs = [pair for pair in self._pairs if pair.is_leaf]
        inside: list[dict[ModuleCall, set[int]]] = []
        for number, side in enumerate((inner_a, inner_b)):
            containers = [call for call in side if call in self._free and not call.is_leaf]
            inside.append(
                {
                    call: {i for i, pair in enumerate(pairs) if call.holds(pair.sides[number][0])}
                    for call in containers
                }
            )
        for call_a, parts in inside[0].items():
            shares = {
                call: len(parts & others) / len(parts | others)
                for call, others in inside[1].items()
                if parts | others and self._fit(call_a, call)
            }
            call_b = max(shares, key=lambda call: shares[call], default=None)
            if call_b is not None and shares[call_b] >= _LEAST_SHARE:
                self._add((call_a,), (call_b,))


def _are_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether marks are those of one weight, perhaps in another format."""
    return a.shape == b.shape and float((a - b).norm()) <= _SAME_WEIGHT * float(a.norm())


def _first_and_sum(call: ModuleCall) -> list[KeptTensor]:
    values = (value((call,), "outputs", index) for index in (0, SUM))
    return [kept for kept in values if kept is not None]
