"""Module calls of a run, the distance of their tensors, and the calls of two runs that compute the same.

To match calls, names come first, then weights (equal in both, or side by side in a fused projection). The aligner of
traces matches the rest between these, in the order of execution: by class, by the shape of a norm's parameters, by the
last part of the name, and by values. Containers match that hold the same matched calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..trace.comparison import align_calls
from ..util.messages import module_name, without_wrappers

# By precision.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUM = -1  # index of the sum of the first two values of a call
# Values of a call's inputs or outputs that are tried against those of the other side.
MOST_VALUES = 4
# Rows with less than this share of the mean norm are compared by that share: padding may be all but zero.
_LEAST_ROW = 0.1
# Masks hold -inf or the least number of a dtype, whose squares have no norm.
_LARGEST = 1e30
_PROJECTIONS = 8
# Weights in bfloat16 are within 0.4 % of those in float32.
_SAME_WEIGHT = 0.02
# A matrix with so many equal rows is the same one, with a fault in the others.
_SAME_ROWS = 0.5
# Values that close are those of one tensor, with a fault or without.
_NEAR = 0.1
# Path of the module, and which of its calls it is.
Key = tuple[str, int]


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype with the fewest bits of precision."""
    return max(dtypes, key=FLOATS.index)


def most_common(dtypes: Iterable[torch.dtype], otherwise: torch.dtype) -> torch.dtype:
    """Return the commonest of the floating-point dtypes, or `otherwise` where there is none."""
    return next((dtype for dtype, _ in Counter(dtypes).most_common() if dtype in FLOATS), otherwise)


@dataclass(eq=False)
class ModuleCall:
    """Call of a module, with copies of its tensors.

    `path` is the name of the module, or of all `parts`, the calls that `joined` made one. `module` is None for a call
    of a trace. `start` and `end` count the starts and ends of all calls, and `number` the calls of the module. `shapes`
    are those of its own parameters.
    """

    path: str
    class_name: str
    module: nn.Module | None
    start: int
    end: int = 0
    number: int = 0
    is_leaf: bool = True
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    shapes: tuple[tuple[int, ...], ...] = ()
    parts: tuple[ModuleCall, ...] = ()

    @property
    def key(self) -> Key:
        """Path and number, which the same call of another run has too."""
        return self.path, self.number

    def holds(self, call: ModuleCall) -> bool:
        """Return True if the call happened during this one."""
        return self.start < call.start and call.end < self.end

    def time(self, kind: str) -> int:
        """Return when the "inputs" or "outputs" were there."""
        return self.start if kind == "inputs" else self.end

    def value(self, kind: str, index: int) -> Tensor | None:
        """Return one of the "inputs" or "outputs", or the SUM of two, which may be `hidden` and `residual`."""
        kept: list[Tensor] = getattr(self, kind)
        if index != SUM:
            return kept[index] if index < len(kept) else None
        has_sum = len(kept) > 1 and kept[0].shape == kept[1].shape and kept[0].is_floating_point()
        return kept[0] + kept[1] if has_sum else None

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the module itself, those of parts side by side."""
        sides = [own_tensors(part.module) for part in self.parts or (self,) if part.module is not None]
        if len(sides) < 2:
            return sides[0] if sides else {}
        names = (name for name in sides[0] if all(name in side for side in sides))
        columns = {name: [torch.atleast_1d(side[name]).cpu() for side in sides] for name in names}
        return {name: torch.cat(x) for name, x in columns.items() if len({part.shape[1:] for part in x}) == 1}

    def in_run(self, run: Run) -> ModuleCall | None:
        """Return the same call of another run, or None."""
        parts = self.parts or (self,)
        return joined([run[part.key] for part in parts]) if all(part.key in run for part in parts) else None


# Calls of one run by their keys, in the order of their starts. The first is that of the whole model.
Run = dict[Key, ModuleCall]


def run_of(calls: Iterable[ModuleCall]) -> Run:
    """Return the calls as a run, numbered, and with the leaves among them marked."""
    counts: Counter[str] = Counter()
    in_order = sorted(calls, key=lambda call: call.start)
    for call, following in zip_longest(in_order, in_order[1:]):
        call.number, call.is_leaf = counts[call.path], following is None or not call.holds(following)
        counts[call.path] += 1
    return {call.key: call for call in in_order}


def joined(parts: Sequence[ModuleCall]) -> ModuleCall:
    """Return calls of projections with one input as one call, with their outputs side by side, as a fused one has."""
    first = parts[0]
    if len(parts) == 1:
        return first
    columns = zip(*(part.outputs for part in parts), strict=False)
    outputs = [torch.cat(side, -1) for side in columns if len({x.shape[:-1] for x in side}) == 1]
    path = ", ".join(part.path for part in parts)
    start, end = min(part.start for part in parts), max(part.end for part in parts)
    return replace(first, path=path, start=start, end=end, outputs=outputs, parts=(*parts,))


class CallPair(NamedTuple):
    """Call of A and call of B that compute the same. One of them may be several beside a fused one, joined."""

    a: ModuleCall
    b: ModuleCall

    @property
    def name(self) -> str:
        """The names of both sides in words."""
        return " | ".join(dict.fromkeys(module_name(call.path) for call in self))

    @property
    def is_leaf(self) -> bool:
        """True if neither call holds another."""
        return self.a.is_leaf and self.b.is_leaf


def rows_of(x: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the rows, by the last dimension, of the tokens that count, by a mask (batch, length) or None for all.

    A tensor without padding has no others.
    """
    lead, rows = x.shape[:-1], x.reshape(-1, x.shape[-1] if x.ndim else 1)
    if tokens is None:
        return rows
    if lead[:2] == tokens.shape:
        chosen = tokens.reshape(*tokens.shape, *(1,) * (len(lead) - 2)).expand(lead)
    elif len(lead) == 3 and (lead[0], lead[2]) == tokens.shape:  # heads before tokens
        chosen = tokens[:, None, :].expand(lead)
    elif lead == (tokens.numel(),):
        chosen = tokens
    else:
        return rows
    return rows[chosen.reshape(-1)]


def rows_of_both(a: Tensor | None, b: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the rows of two tensors in the same layout, or None where the shapes do not go together."""
    if a is None or b is None:
        return None
    if a.ndim == b.ndim == 4 and a.shape != b.shape == a.transpose(1, 2).shape:
        b = b.transpose(1, 2)  # heads before tokens on one side, after them on the other
    rows_a, rows_b = rows_of(a, tokens), rows_of(b, tokens)
    width = max(rows_a.shape[-1], rows_b.shape[-1])
    if rows_a.numel() != rows_b.numel() or not rows_a.numel() or rows_a.numel() % width:
        return None
    return rows_a.reshape(-1, width).to(torch.float64), rows_b.reshape(-1, width).to(torch.float64)


class Errors(NamedTuple):
    """Distance of two tensors: relative error of all, each row and the worst, cosine, largest difference of an element.

    The last three are of two models: the noise floor, the error over the floor, and the places of the values compared.
    """

    total: float
    rows: Tensor
    worst_row: float
    cosine: float
    largest_difference: float
    floor: float = 0.0
    ratio: float = 0.0
    values: tuple[int, int] = (0, 0)


def errors_between(a: Tensor, b: Tensor) -> Errors:
    """Return how far the rows of `b` are from those of `a`. The same non-finite number on both sides is no error."""
    same = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    apart = (~a.isfinite() | ~b.isfinite()) & ~same
    a, b = (x.masked_fill(same, 0).nan_to_num(0.0).clamp(-_LARGEST, _LARGEST) for x in (a, b))
    difference = a - b
    norms = a.norm(dim=-1)
    distances = difference.norm(dim=-1).masked_fill(apart.any(-1), float("inf"))
    whole, overall = float(norms.norm()), float(distances.norm())
    least = max(_LEAST_ROW * whole / max(len(norms), 1) ** 0.5, 1e-300)
    rows = distances / norms.clamp(min=least)
    both = whole * float(b.norm())
    return Errors(
        overall / whole if whole else (0.0 if overall == 0 else float("inf")),
        rows,
        float(rows.max()) if len(rows) else 0.0,
        float((a * b).sum()) / both if both else 1.0,
        float("inf") if bool(apart.any()) else float(difference.abs().max()) if difference.numel() else 0.0,
    )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters and buffers, the weight with a row for each output."""
    kept = [*module._parameters.items(), *module._buffers.items()]
    floats = [(name, x) for name, x in kept if x is not None and x.is_floating_point() and not x.is_meta]
    tensors = {name: x.detach() for name, x in floats if x.layout is torch.strided and x.numel()}
    # transformers' Conv1D keeps its weight turned.
    if type(module).__name__ == "Conv1D" and "weight" in tensors and tensors["weight"].ndim == 2:
        tensors["weight"] = tensors["weight"].t()
    return tensors


# Matching.


def match_calls(runs: Sequence[Run], tokens: Tensor | None) -> list[CallPair]:
    """Return the pairs of calls of A and B that compute the same, in the order of A."""
    matcher = _Matcher(runs, tokens)
    matcher.align([lambda call: without_wrappers(call.path)], lambda call: True)
    matcher.match_weights()
    matcher.match_leaves_in_order()
    matcher.match_containers()
    roots = CallPair(*(next(iter(run.values())) for run in runs))
    return sorted([*matcher.pairs, roots], key=lambda pair: pair.a.start)


class _Matcher:
    """The pairs of the calls below the two models, and the calls that have none yet."""

    def __init__(self, runs: Sequence[Run], tokens: Tensor | None) -> None:
        self.pairs: list[CallPair] = []
        self._tokens = tokens
        self._sides = [[*run.values()][1:] for run in runs]
        self._free = {call for side in self._sides for call in side}
        self._sizes = {call: {rows_of(x, tokens).numel() for x in call.outputs} for call in self._free}

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
                    parts = _in_order({call: apart[call] for call in group if call in self._free}, rows)
                    if len(parts) > 1 or (parts and self._fit(parts[0], whole)):
                        self._add(*[joined(parts), whole][::step])
                        break

    def match_leaves_in_order(self) -> None:
        """Match leaves between those that are matched."""
        # Unmatched calls have no equal on the first level, so matched ones stay where they are.
        anchors: dict[ModuleCall, object] = {}
        for number, pair in enumerate(self.pairs):
            anchors |= dict.fromkeys(((*call.parts, call)[0] for call in pair), number)

        def norm(call: ModuleCall) -> object:
            # Calls with the same matrix have been matched already.
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
        if any(call.module is not None and call.module._modules for call in (a, b)):
            return False  # compiled containers, whose parts make no calls
        values = [[call.value("outputs", index) for index in (0, SUM)] for call in (a, b)]
        pairs = (rows_of_both(x, y, self._tokens) for x in values[0] for y in values[1])
        return any(rows is not None and errors_between(*rows).total < _NEAR for rows in pairs)

    def match_containers(self) -> None:
        """Match containers that hold the same pairs of leaves."""
        leaves = [pair for pair in self.pairs if pair.is_leaf]
        free = [[call for call in side if call in self._free] for side in self._sides]
        inside = dict[ModuleCall, list[CallPair]]()
        for number in (0, 1):
            inside |= {call: [pair for pair in leaves if call.holds(pair[number])] for call in free[number]}
        for a in free[0]:
            alike = (b for b in free[1] if inside[a] == inside[b] and self._fit(a, b))
            if inside[a] and (match := next(alike, None)) is not None:
                self._add(a, match)


def _row_marks(call: ModuleCall) -> Tensor | None:
    """Return a few projections of each row of a leaf's weight; None without a weight, and where all numbers are equal.

    Equal rows of two weights have nearly equal marks, also in another format.
    """
    weight = None if call.module is None or not call.is_leaf else own_tensors(call.module).get("weight")
    if weight is None or weight.ndim == 0:
        return None
    rows = weight.reshape(len(weight), -1)
    rows = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    if float(rows.max() - rows.min()) == 0.0:
        return None
    if rows.shape[-1] > 1:
        generator = torch.Generator().manual_seed(rows.shape[-1])
        rows = rows @ torch.randn(rows.shape[-1], _PROJECTIONS, generator=generator).to(rows)
    return rows.to("cpu", torch.float32)


def _in_order(marks: dict[ModuleCall, Tensor], whole: Tensor) -> list[ModuleCall]:
    """Return the calls in the order in which the whole weight has their rows, or nothing."""
    order, at = list[ModuleCall](), 0
    while at < len(whole):
        alike = (call for call, rows in marks.items() if _are_alike(rows, whole[at : at + len(rows)]))
        part = next((call for call in alike if call not in order), None)
        if part is None:
            return []
        order.append(part)
        at += len(marks[part])
    return order


def _are_alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    distances, sizes = (a - b).norm(dim=1), a.norm(dim=1)
    # A row of zeros is in many weights, and so proves nothing.
    same_rows = float((distances < _SAME_WEIGHT * sizes).float().mean()) if a.shape[1] > 1 else 0.0
    return same_rows >= _SAME_ROWS or float(distances.norm()) <= _SAME_WEIGHT * float(sizes.norm())
