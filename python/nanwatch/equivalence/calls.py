"""Module calls of a run, and which call of one implementation of a model is which of another.

Names come first, then weights (equal in both, or side by side in a fused projection). What is left is aligned in the
order of execution, by class, name, place between the matched calls, and values. Containers match by what they hold.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..instrumentation.slot import TemporaryWrapper, attached
from ..recording.walk import Leaf, call_leaves, leaves
from ..util.modules import each_module
from ..util.visible import module_name, without_wrappers
from .differences import Kept, Store, Tokens, relative_errors, side_by_side, sketches, total, weight_of

_PROJECTIONS = 8
# Weights in bfloat16 are within 0.4 % of those in float32.
_SAME_WEIGHT = 0.02
# A match by score alone needs more than a place between the same neighbours, which have 4.
_LEAST_SCORE = 5.0
# Containers of which less is alike, by the matched calls inside, are not the same.
_LEAST_SHARE = 0.5
# Values that close are those of one tensor, with a fault or without.
_NEAR = 0.9


@dataclass(eq=False)
class Call:
    """Call of a module. `key` is its path and which of the module's calls it is.

    `module` is None for a call of a trace. `start` and `end` count the starts and ends of all calls. `parent` is the
    call around it. `weight_shape` is that of the module's weight, or () where it has none.
    """

    key: tuple[str, int]
    class_name: str
    module: nn.Module | None
    parent: Call | None
    start: int
    end: int = 0
    is_leaf: bool = True
    inputs: list[Kept] = field(default_factory=list)
    outputs: list[Kept] = field(default_factory=list)
    weight_shape: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        """The name of the module."""
        return self.key[0]

    def holds(self, other: Call) -> bool:
        """Return True if the other call happened during this one."""
        return self.start < other.start and other.end < self.end


@dataclass(frozen=True)
class Pair:
    """Calls that compute the same: one on each side, or several beside a fused one, in the order of its columns."""

    a: tuple[Call, ...]
    b: tuple[Call, ...]

    @property
    def name(self) -> str:
        """The names of both sides."""
        one, other = (", ".join(module_name(call.path) for call in side) for side in (self.a, self.b))
        return one if one == other else f"{one} | {other}"

    @property
    def modules(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules of both sides."""
        a, b = ([one.module for one in side if one.module is not None] for side in (self.a, self.b))
        return a, b

    def time(self, kind: str, side: int) -> int:
        """Return when the "inputs" or "outputs" were there, on side 0 or 1."""
        calls = (self.a, self.b)[side]
        return calls[0].start if kind == "inputs" else calls[-1].end


def innermost(calls: list[Call], start: int, end: int) -> Call:
    """Return the innermost call from one time to another."""
    return max((one for one in calls if one.start <= start and one.end >= end), key=lambda one: one.start)


def alone(calls: list[Call], pairs: list[Pair], start: int, end: int) -> str:
    """Name the modules with parameters that one side calls between two times and that match none of the other's."""
    known = {id(one) for pair in pairs for one in (*pair.a, *pair.b)}
    between = [one for one in calls if start < one.start and one.end < end and one.is_leaf]
    found = [one for one in between if id(one) not in known and _has_parameters(one.module)]
    rest = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return ", ".join(module_name(one.path) for one in found[:2]) + rest


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def part_of_difference(parts: Sequence[Call], a: Tensor, b: Tensor, limit: float) -> list[str]:
    """Return in words which of the calls beside a fused one differ, unless all do."""
    widths = [one.outputs[0].shape[-1] for one in parts] if len(parts) > 1 else []
    if sum(widths) != a.shape[-1]:
        return []
    errors = [
        relative_errors(*both).total for both in zip(a.split(widths, -1), b.split(widths, -1), strict=True)
    ]
    off = [module_name(one.path) for one, error in zip(parts, errors, strict=True) if error > limit]
    return [f"in {', '.join(off)} only"] if 0 < len(off) < len(parts) else []


def is_sum(values: Sequence[Kept]) -> bool:
    """Return True if the first two values may be hidden and residual."""
    if len(values) < 2:
        return False
    a, b = values[:2]
    return a.shape == b.shape and a.rows.shape == b.rows.shape and a.rows.is_floating_point()


def value(calls: Sequence[Call], kind: str, pick: tuple[int, ...]) -> Kept | None:
    """Return a value of the call, or the sum of two; those of several calls, which had one input, side by side."""
    found = [getattr(one, kind) for one in (calls if kind == "outputs" else calls[:1])]
    if any(pick[-1] >= len(values) for values in found):
        return None
    sums = [total([values[i] for i in pick]) for values in found]
    return sums[0] if len(sums) == 1 else side_by_side(sums)


def _marks(call: Call) -> Tensor | None:
    """Return projections of each row of the call's weight. Weights that are one number throughout mark nothing."""
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


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).norm()) <= _SAME_WEIGHT * float(a.norm())


@contextmanager
def recorded(model: nn.Module, most_bytes: int) -> Iterator[list[Call]]:
    """Record the calls that this thread makes of the model and its parts, in the order in which they end."""
    log = _Log(Store(most_bytes))
    with attached(_Wrapper(module, path, log) for path, module in each_module(model)):
        yield log.calls


class _Wrapper(TemporaryWrapper):
    """Wrapper that records the calls of its module."""

    def __init__(self, module: nn.Module, path: str, log: _Log) -> None:
        super().__init__(module)
        self._path = path
        self._log = log

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        log = self._log
        if is_compiling() or threading.get_ident() != log.thread:
            return self.run_inner(module, args, kwargs)
        call = log.begin(module, self._path, call_leaves(args, kwargs))
        try:
            result = self.run_inner(module, args, kwargs)
        finally:
            log.inside.pop()
        log.end(call, leaves(result, "output"))
        return result


class _Log:
    """Calls of one run."""

    def __init__(self, store: Store) -> None:
        self.calls: list[Call] = []
        self.inside: list[Call] = []
        self.thread = threading.get_ident()
        self._store = store
        self._clock = itertools.count()
        self._occurrences: Counter[str] = Counter()

    def begin(self, module: nn.Module, path: str, found: list[Leaf]) -> Call:
        parent = self.inside[-1] if self.inside else None
        if parent is not None:
            parent.is_leaf = False
        key = (path, self._occurrences[path])
        self._occurrences[path] += 1
        call = Call(key, type(module).__name__, module, parent, next(self._clock), inputs=self._keep(found))
        weight = weight_of(module)
        call.weight_shape = () if weight is None else tuple(weight.shape)
        self.inside.append(call)
        return call

    def end(self, call: Call, found: list[Leaf]) -> None:
        call.end = next(self._clock)
        call.outputs = [kept for kept in self._keep(found) if kept.rows.is_floating_point()]
        self.calls.append(call)

    def _keep(self, found: list[Leaf]) -> list[Kept]:
        tensors = [
            x for _, x in found if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta
        ]
        return [self._store.keep(x) for x in tensors if x.numel() and x.dtype is not torch.bool]


class Matcher:
    """Search for the calls of two runs that compute the same."""

    def __init__(self, a: Sequence[Call], b: Sequence[Call], tokens: Tokens) -> None:
        self._a, self._b = a, b
        self._tokens = tokens
        self._sizes = {
            one: {len(tokens.rows(kept)) * (kept.shape or (1,))[-1] for kept in one.outputs}
            for one in (*a, *b)
        }
        self._free = {*a, *b}
        self._marks: dict[Call, Tensor] = {}
        self.pairs: list[Pair] = []

    def match(self) -> list[Pair]:
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

    def _add(self, a: tuple[Call, ...], b: tuple[Call, ...]) -> None:
        self.pairs.append(Pair(a, b))
        self._free.difference_update(a, b)

    def _left(self, calls: Sequence[Call]) -> list[Call]:
        return [one for one in calls if one in self._free]

    def _fit(self, a: Call, b: Call) -> bool:
        return b in self._free and not self._sizes[a].isdisjoint(self._sizes[b])

    def _match_names(self) -> None:
        """Match calls of the same path."""
        names = {(without_wrappers(one.path), one.key[1]): one for one in self._b if one.parent is not None}
        for one in self._a:
            other = names.get((without_wrappers(one.path), one.key[1]))
            if other is not None and one.parent is not None and self._fit(one, other):
                self._add((one,), (other,))

    def _match_weights(self) -> None:
        """Match each call to the first one with the same weight."""
        left = [one for one in self._left(self._b) if one in self._marks]
        for one in self._left(self._a):
            mark = self._marks.get(one)
            if mark is not None:
                same = (b for b in left if self._fit(one, b) and _equal(mark, self._marks[b]))
                if (found := next(same, None)) is not None:
                    self._add((one,), (found,))

    def _fused(self, ones: Sequence[Call], others: Sequence[Call]) -> Iterator[tuple[tuple[Call, ...], Call]]:
        """Yield calls with one input, and the call on the other side whose weight has all their rows."""
        groups: dict[int, list[Call]] = defaultdict(list)
        for one in self._left(ones):
            if one in self._marks and one.inputs:
                groups[id(one.inputs[0])].append(one)
        for other in self._left(others):
            for group in groups.values() if other in self._marks else ():
                order = self._order(group, self._marks[other]) if self._free.issuperset(group) else ()
                if len(order) > 1:
                    yield order, other
                    break

    def _order(self, group: list[Call], whole: Tensor) -> tuple[Call, ...]:
        """Return the calls in the order in which the fused weight has them, or nothing."""
        found: list[Call] = []
        at = 0
        while at < len(whole):
            left = ((one, self._marks[one]) for one in group if one not in found)
            fits = (one for one, mark in left if _equal(mark, whole[at : at + len(mark)]))
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

    def _scores(self, a: list[Call], b: list[Call]) -> np.ndarray[Any, Any]:
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

    def _values(self, call: Call) -> list[list[Tensor]]:
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


def _neighbours(ends: np.ndarray[Any, Any], call: Call) -> tuple[int, int]:
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


def _score(a: Call, b: Call, around_a: Any, around_b: Any, values_a: Any, values_b: Any) -> float:
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
