"""Search for the calls of two runs that compute the same.

Names come first, then weights (equal in both, or side by side in a fused projection). The aligner of traces matches the
rest between these, in the order of execution: by class, by the shape of a norm's parameters, by the last part of the
name, and by values. Containers match by what they hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..trace.align import align_calls
from ..util.visible import without_wrappers
from .calls import SUM, CallPair, ModuleCall, Tokens, errors_between, joined, own_tensors

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


def match_calls(a: _Calls, b: _Calls, tokens: Tokens) -> list[CallPair]:
    """Return the pairs of calls that compute the same, in the order of A."""
    matcher = _Matcher(a, b, tokens)
    matcher.align([lambda call: without_wrappers(call.path)], lambda call: True)
    matcher.match_weights()
    matcher.match_leaves_in_order()
    matcher.match_containers()
    roots = [call for side in (a, b) for call in side if call.parent is None]
    if len(roots) == 2:
        matcher.pairs.append(CallPair(*roots))
    return sorted(matcher.pairs, key=lambda pair: pair.a.start)


class _Matcher:
    """The pairs of the calls below the two models, and the calls that have none yet."""

    def __init__(self, a: _Calls, b: _Calls, tokens: Tokens) -> None:
        self.pairs: list[CallPair] = []
        self._tokens = tokens
        self._sides = [[call for call in side if call.parent is not None] for side in (a, b)]
        self._free = {call for side in self._sides for call in side}
        self._sizes = {call: {tokens.rows(x).numel() for x in call.outputs} for call in self._free}

    def _add(self, *pair: ModuleCall) -> None:
        self.pairs.append(CallPair(*pair))
        for call in pair:
            self._free.difference_update(call.parts or (call,))

    def _fit(self, a: ModuleCall, b: ModuleCall) -> bool:
        return {a, b} <= self._free and not self._sizes[a].isdisjoint(self._sizes[b])

    def align(
        self,
        levels: Sequence[Callable[[ModuleCall], object]],
        counts: Callable[[ModuleCall], bool],
        are_alike: Callable[[ModuleCall, ModuleCall], bool] | None = None,
    ) -> None:
        """Match the calls that count in their order by keys, the strictest first, and then those that are alike."""
        a, b = ([call for call in side if counts(call)] for side in self._sides)
        keys = [([key(call) for call in a], [key(call) for call in b]) for key in levels]
        for i, j in align_calls(keys, are_alike and (lambda i, j: are_alike(a[i], b[j]))):
            if self._fit(a[i], b[j]):
                self._add(a[i], b[j])

    def match_weights(self) -> None:
        """Match calls with the same weight, and a fused call to those whose weights it has side by side."""
        marks_a, marks_b = (
            {call: marks for call in side if call in self._free and (marks := _row_marks(call)) is not None}
            for side in self._sides
        )
        for apart, fused, step in ((marks_a, marks_b, 1), (marks_b, marks_a, -1)):
            groups: dict[int, list[ModuleCall]] = defaultdict(list)
            for call in apart:
                groups[id(call.inputs[0] if call.inputs else call)].append(call)
            for whole, rows in fused.items():
                for group in groups.values() if whole in self._free else ():
                    parts = [call for call in group if call in self._free]
                    order = _order([apart[call] for call in parts], rows)
                    if len(order) > 1 or (order and self._fit(parts[order[0]], whole)):
                        self._add(*[joined([parts[i] for i in order]), whole][::step])
                        break

    def match_leaves_in_order(self) -> None:
        """Match leaves between those that are matched."""
        # Unmatched calls have no equal on the first level, so matched ones stay where they are.
        anchors: dict[ModuleCall, object] = {}
        for number, pair in enumerate(self.pairs):
            anchors |= dict.fromkeys(((*call.parts, call)[0] for call in pair), number)

        def norm(call: ModuleCall) -> object:
            # Matrices that are one would have been matched.
            is_norm = call.shapes and all(len(shape) == 1 for shape in call.shapes)
            return (call.shapes, *sorted(self._sizes[call])) if is_norm else call

        levels: list[Callable[[ModuleCall], object]] = [
            lambda call: anchors.get(call, call),
            lambda call: (call.class_name, *sorted(self._sizes[call])),
            norm,
            lambda call: (call.path.rpartition(".")[2], *sorted(self._sizes[call])),
        ]
        self.align(levels, lambda call: call.is_leaf, self._are_near)

    def _are_near(self, a: ModuleCall, b: ModuleCall) -> bool:
        """Return whether the first outputs are nearly the same."""
        if any(call.module is not None and call.module._modules for call in (a, b)):
            return False  # compiled containers, whose parts make no calls
        values = [[call.value("outputs", index) for index in (0, SUM)] for call in (a, b)]
        pairs = (self._tokens.pair(x, y) for x in values[0] for y in values[1])
        return any(rows is not None and errors_between(*rows).total < _NEAR for rows in pairs)

    def match_containers(self) -> None:
        """Match each container to the free one with the largest share of matched calls inside in common."""
        leaves = [pair for pair in self.pairs if pair.is_leaf]
        inside_a, inside_b = (
            {
                call: {i for i, pair in enumerate(leaves) if call.holds(pair[number])}
                for call in side
                if call in self._free and not call.is_leaf
            }
            for number, side in enumerate(self._sides)
        )
        for call_a, parts in inside_a.items():
            shares = {
                call: len(parts & others) / len(parts | others)
                for call, others in inside_b.items()
                if parts | others and self._fit(call_a, call)
            }
            call_b = max(shares, key=lambda call: shares[call], default=None)
            if call_b is not None and shares[call_b] >= _LEAST_SHARE:
                self._add(call_a, call_b)


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
