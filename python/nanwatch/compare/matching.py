"""Search for the calls of two runs that compute the same.

Names come first, then weights (equal in both, or side by side in a fused projection). The aligner of traces matches the
rest between these, in the order of execution: by class, by the shape of a norm's weight, by name, and by values.
Containers match by what they hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..trace.align import align_calls
from ..util.visible import without_wrappers
from .calls import SUM, CallPair, ModuleCall, Tokens, errors_between, own_tensors, value

_PROJECTIONS = 8
# Weights in bfloat16 are within 0.4 % of those in float32.
_SAME_WEIGHT = 0.02
# A matrix with so many equal rows is the same one, with a fault in the others.
_SAME_ROWS = 0.5
# Containers of which less is alike, by the matched calls inside, are not the same.
_LEAST_SHARE = 0.5
# Values that close are those of one tensor, with a fault or without.
_NEAR = 0.1
_Calls = Sequence[ModuleCall]
_Level = Callable[[ModuleCall], object]


def match_calls(a: _Calls, b: _Calls, tokens: Tokens) -> list[CallPair]:
    """Return the pairs of calls that compute the same, in the order of A."""
    matcher = _Matcher((a, b), tokens)
    inner_a, inner_b = ([call for call in side if call.parent is not None] for side in (a, b))
    matcher.align(inner_a, inner_b, [lambda call: without_wrappers(call.path)])
    matcher.match_weights(inner_a, inner_b)
    matcher.match_in_order(*([call for call in side if call.is_leaf] for side in (inner_a, inner_b)))
    matcher.match_containers(inner_a, inner_b)
    roots = [call for side in (a, b) for call in side if call.parent is None]
    if len(roots) == 2:
        matcher.pairs.append(CallPair((roots[0],), (roots[1],)))
    return sorted(matcher.pairs, key=lambda pair: pair.a[0].start)


class _Matcher:
    """The pairs found so far, and the calls that have none."""

    def __init__(self, sides: tuple[_Calls, _Calls], tokens: Tokens) -> None:
        self.pairs: list[CallPair] = []
        self._tokens = tokens
        self._free = {*sides[0], *sides[1]}
        self._sizes = {call: {tokens.rows(x).numel() for x in call.outputs} for call in self._free}

    def _add(self, a: tuple[ModuleCall, ...], b: tuple[ModuleCall, ...]) -> None:
        self.pairs.append(CallPair(a, b))
        self._free.difference_update(a, b)

    def _fit(self, a: ModuleCall, b: ModuleCall) -> bool:
        return {a, b} <= self._free and not self._sizes[a].isdisjoint(self._sizes[b])

    def align(
        self,
        a: _Calls,
        b: _Calls,
        levels: Sequence[_Level],
        fits: Callable[[ModuleCall, ModuleCall], bool] | None = None,
    ) -> None:
        """Match calls in their order by keys, the strictest first, and then those that `fits` accepts."""
        keys = [([key(call) for call in a], [key(call) for call in b]) for key in levels]
        is_pair = None if fits is None else (lambda i, j: fits(a[i], b[j]))
        for i, j in align_calls(keys, is_pair):
            if self._fit(a[i], b[j]):
                self._add((a[i],), (b[j],))

    def match_weights(self, *sides: _Calls) -> None:
        """Match each call to the first one with the same weight, then to several that make up its weight."""
        rows = [
            {call: rows for call in side if call in self._free and (rows := _row_marks(call)) is not None}
            for side in sides
        ]
        for call_a, part in rows[0].items():
            alike = (b for b, whole in rows[1].items() if _are_alike(part, whole) and self._fit(call_a, b))
            if (call_b := next(alike, None)) is not None:
                self._add((call_a,), (call_b,))
        for number in (0, 1):
            groups: dict[int, list[ModuleCall]] = defaultdict(list)
            for call in rows[number]:
                if call.inputs:
                    groups[id(call.inputs[0])].append(call)
            for whole, marks in rows[1 - number].items():
                for group in groups.values() if whole in self._free else ():
                    parts = [call for call in group if call in self._free]
                    order = _order([rows[number][call] for call in parts], marks)
                    if len(order) > 1:
                        ordered = tuple(parts[i] for i in order)
                        self._add(*((ordered, (whole,)) if number == 0 else ((whole,), ordered)))
                        break

    def match_in_order(self, a: _Calls, b: _Calls) -> None:
        """Match leaves between those that are matched."""
        # Unmatched calls have no equal on the first level, so matched ones stay where they are.
        anchors: dict[ModuleCall, object] = {}
        for number, pair in enumerate(self.pairs):
            anchors |= dict.fromkeys((*pair.a[:1], *pair.b[:1]), number)

        def new_norm(call: ModuleCall) -> object:
            # Matrices that are one would have been matched.
            return (call.weight_shape, *sorted(self._sizes[call])) if len(call.weight_shape) == 1 else call

        levels: list[_Level] = [
            lambda call: anchors.get(call, call),
            lambda call: (call.class_name, *sorted(self._sizes[call])),
            new_norm,
            lambda call: (call.path.rpartition(".")[2], *sorted(self._sizes[call])),
        ]
        self.align(a, b, levels, self._are_near)

    def _are_near(self, a: ModuleCall, b: ModuleCall) -> bool:
        """Return whether the first outputs are nearly the same."""
        if any(call.module is not None and call.module._modules for call in (a, b)):
            return False  # compiled containers, whose parts make no calls
        values = [[value((call,), "outputs", index) for index in (0, SUM)] for call in (a, b)]
        pairs = (
            self._tokens.pair(x, y) for x in values[0] for y in values[1] if x is not None and y is not None
        )
        return any(rows is not None and errors_between(*rows).total < _NEAR for rows in pairs)

    def match_containers(self, *sides: _Calls) -> None:
        """Match each container to the free one with the largest share of matched calls inside in common."""
        leaves = [pair for pair in self.pairs if pair.is_leaf]
        inside = [
            {
                call: {i for i, pair in enumerate(leaves) if call.holds(pair.sides[number][0])}
                for call in side
                if call in self._free and not call.is_leaf
            }
            for number, side in enumerate(sides)
        ]
        for call_a, parts in inside[0].items():
            shares = {
                call: len(parts & others) / len(parts | others)
                for call, others in inside[1].items()
                if parts | others and self._fit(call_a, call)
            }
            call_b = max(shares, key=lambda call: shares[call], default=None)
            if call_b is not None and shares[call_b] >= _LEAST_SHARE:
                self._add((call_a,), (call_b,))


def _row_marks(call: ModuleCall) -> Tensor | None:
    """Return a few projections of each row of a leaf's weight; None for no weight, and for one number throughout.

    Equal rows of two weights have nearly equal marks, also in another format.
    """
    weight = None if call.module is None or not call.is_leaf else own_tensors(call.module).get("weight")
    if weight is None or weight.ndim == 0:
        return None
    rows = weight.flatten(1) if weight.ndim > 1 else weight[:, None]
    rows = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    if float(rows.max() - rows.min()) == 0.0:
        return None
    if rows.shape[-1] > 1:
        generator = torch.Generator().manual_seed(rows.shape[-1])
        rows = rows @ torch.randn(rows.shape[-1], _PROJECTIONS, generator=generator).to(rows)
    return rows.to("cpu", torch.float32)


def _order(parts: Sequence[Tensor], whole: Tensor) -> list[int]:
    """Return the order in which the whole weight has the rows of parts, or nothing."""
    order: list[int] = []
    at = 0
    while at < len(whole):
        left = (i for i in range(len(parts)) if i not in order)
        part = next((i for i in left if _are_alike(parts[i], whole[at : at + len(parts[i])])), None)
        if part is None:
            return []
        order.append(part)
        at += len(parts[part])
    return order


def _are_alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    # A row of zeros is in many weights, and so proves nothing.
    are_same = (a - b).norm(dim=1) < _SAME_WEIGHT * a.norm(dim=1)
    if a.shape[1] > 1 and float(are_same.float().mean()) >= _SAME_ROWS:
        return True
    return float((a - b).norm()) <= _SAME_WEIGHT * float(a.norm())
