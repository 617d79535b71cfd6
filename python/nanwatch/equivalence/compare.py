"""`nanwatch.compare`: the first module in which two implementations of one model differ by more than rounding does."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..numerics.readable import dtype_name
from ..util.modules import each_parameter
from ..util.visible import spell
from .calls import Call, Matcher, Pair, alone, innermost, is_sum, part_of_difference, recorded, value
from .differences import Errors, Tokens, by_token, module_differences, relative_errors, shape_of_difference
from .results import Comparison, ModuleError
from .state import State

Caller = Callable[[nn.Module, Any], Any]
# Leaves of a call's inputs or outputs that are tried against those of the other side.
_LEAVES = 4
# A difference that is this many times larger than what is left of it after the module is one of convention.
_VANISHED = 100.0
_KINDS = ("inputs", "outputs")
# By precision.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    inputs: Any,
    *,
    call_a: Caller | None = None,
    call_b: Caller | None = None,
    tokens: Tensor | None = None,
    factor: float = 8.0,
    most_bytes: int = 1 << 30,
) -> Comparison:
    """Run two implementations of one model on the same inputs, and name the first module that differs.

    Args:
        model_a: the reference.
        model_b: the same weights in another implementation, precision, device or mode.
        inputs: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        call_a: how to call A, as `lambda model, inputs: model(inputs["input_ids"])`, where `model(inputs)` will not do.
        call_b: the same for B.
        tokens: mask (batch, length) of the tokens that count. Default: a two-dimensional `inputs["attention_mask"]`.
        factor: how many times the noise floor a difference must have.
        most_bytes: memory for copies of tensors, per run. Beyond it rows are kept as sketches of 32 numbers.

    Modules are matched by name, by weights, as parts of a fused projection, else by class, order and values. The noise
    floor of each module is its error against a run of the same model in higher precision, for which the models are
    copied. Models of two precisions are held to the coarser one.

    Neither model is changed, and random states are as before. Gradients are off. Raises what the models raise. The
    result has `to_text()`, `to_json()` and `to_html()`.

    >>> import copy, torch
    >>> from nanwatch import compare
    >>> a = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4, eps=1e-5))
    >>> b = copy.deepcopy(a)
    >>> b[1].eps = 1e-2
    >>> found = compare(a, b, torch.randn(3, 4))
    >>> found.first.module_a, found.likely[0]
    ('1', 'eps is 1e-05 in A and 0.01 in B')
    """
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} should be a torch.nn.Module, got {type(model).__name__}")
    if not factor > 1:
        raise ValueError(f"factor should be above 1, the noise floor itself, got {factor}")
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # transformers' BatchEncoding among them
        mask = inputs.get("attention_mask")
        tokens = mask if tokens is None and isinstance(mask, Tensor) and mask.ndim == 2 else tokens
    state = State([model_a, model_b])
    with state.kept():
        a = _Model(model_a, call_a, inputs, state, most_bytes)
        b = _Model(model_b, call_b, inputs, state, most_bytes)
        return _ModelComparer((a, b), Tokens(tokens), factor).compare()


class _Model:
    """One of the two models, and how to run it."""

    def __init__(
        self, model: nn.Module, call: Caller | None, inputs: Any, state: State, most_bytes: int
    ) -> None:
        self._model = model
        self._call = call
        self._inputs = inputs
        self._state = state
        self._most_bytes = most_bytes
        self.calls = self._run(model, None)
        dtypes = Counter(kept.rows.dtype for one in self.calls for kept in one.outputs)
        known = [dtype for dtype, _ in dtypes.most_common() if dtype in FLOATS]
        self.dtype = known[0] if known else torch.float32

    def run_in(self, dtype: torch.dtype) -> Runs:
        """Return the calls of a copy in this dtype, or of the model itself where that is its own."""
        if dtype is self.dtype:
            return {one.key: one for one in self.calls}
        calls = self._run(copy.deepcopy(self._model).to(dtype), dtype)
        for one in calls:
            one.module = self._model  # so that the copy is freed
        return {one.key: one for one in calls}

    def _run(self, model: nn.Module, dtype: torch.dtype | None) -> list[Call]:
        self._state.restore()
        device = next((x.device for x in each_parameter(model)), None)

        def moved(x: Tensor) -> Tensor:
            return x.detach().clone().to(device, dtype if x.is_floating_point() else None)

        inputs = tree_map_only(Tensor, moved, self._inputs)
        with torch.no_grad(), recorded(model, self._most_bytes) as calls:
            if self._call is not None:
                self._call(model, inputs)
            elif isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
        root = next((one for one in reversed(calls) if one.parent is None), None)
        if root is None:
            raise ValueError(f"no module of the {type(model).__name__} was called: see call_a and call_b")
        inside = [one for one in calls if one is root or root.holds(one)]  # a warm-up comes before
        return sorted(inside, key=lambda one: one.start)


@dataclass(frozen=True)
class Seen:
    """Comparison of an event: the errors, the floor, and how many times the floor the error is."""

    errors: Errors
    floor: float
    ratio: float
    shape: tuple[int, ...]
    picks: tuple[tuple[int, ...], ...]


# Kind of values, and of which calls.
Event = tuple[str, Pair]
# Calls by their keys.
Runs = dict[tuple[str, int], Call]


class Side(Protocol):
    """Calls of one side of a comparison, in the order of their starts, and its dtype."""

    calls: list[Call]
    dtype: torch.dtype


class Comparer(ABC):
    """Comparison of the events of two runs, in the order of A, and the search for the first difference."""

    def __init__(self, sides: tuple[Side, Side], tokens: Tokens, factor: float) -> None:
        self._sides = sides
        self._tokens = tokens
        self._factor = factor
        self._coarse = max((side.dtype for side in sides), key=FLOATS.index)
        self._remarks: list[str] = []
        # Side, and its runs in low and in high precision.
        self._measured: list[tuple[int, Runs, Runs]] = []
        self._seen: dict[Event, Seen | None] = {}

    def compare(self) -> Comparison:
        """Return the result."""
        floor = self._measure()
        calls_a, calls_b = (side.calls for side in self._sides)
        pairs = self._match()
        self._seen = {(kind, pair): self._see(kind, pair) for pair in pairs for kind in _KINDS}
        equal, event, last, why = self._first(pairs)
        first, where, words = None, "", list[str]()
        if event is not None and last is not None:
            kind, pair = event
            is_fed = self._seen["inputs", pair] is not None or not (pair.a[0].inputs and pair.b[0].inputs)
            if not (kind == "outputs" and pair.a[0].is_leaf and is_fed):
                where = f"in its own code, between {_spell(last)}, which agrees, and {_spell(event)}, which does not"
                times = [sorted((last[1].time(last[0], i), pair.time(kind, i))) for i in (0, 1)]
                found = [innermost(side.calls, *when) for side, when in zip(self._sides, times, strict=True)]
                names = [
                    alone(side.calls, pairs, *when) for side, when in zip(self._sides, times, strict=True)
                ]
                if not any(one.is_leaf for one in found):  # of a leaf nothing inside shows
                    if all(names):
                        where += f". There A calls {names[0]} and B {names[1]}, which were not matched: compare them"
                    elif any(names):
                        where += f". Only {'A' if names[0] else 'B'} calls {names[0] or names[1]} there"
                pair = Pair((found[0],), (found[1],))
            first = self._error(pair)
            seen = self._seen[event]
            modules = [call.module for call in (*pair.a, *pair.b) if call.module is not None]
            if len(modules) == 2:
                words = module_differences(*modules, is_leaf=pair.a[0].is_leaf)
            if seen is not None and (values := self._values(*event, *seen.picks)) is not None:
                parts = max(pair.a, pair.b, key=len)
                words += part_of_difference(parts, *values[1:], self._factor * seen.floor)
                words += shape_of_difference(*values[1:], seen.errors, seen.shape, seen.floor)
        rows = tuple(row for pair in pairs if (row := self._error(pair)).error is not None)
        return Comparison(
            equal, first, where, tuple(words), why, floor, self._factor, len(calls_a), len(calls_b), rows,
            tuple(self._remarks[:5]),
        )  # fmt: skip

    @abstractmethod
    def _measure(self) -> str:
        """Fill `_measured`. Return in words how the floor was measured."""

    def _match(self) -> list[Pair]:
        """Return the calls of both sides that compute the same, in the order of A."""
        a, b = self._sides
        return Matcher(a.calls, b.calls, self._tokens).match()

    def _see(self, kind: str, pair: Pair) -> Seen | None:
        """Compare the inputs or the outputs of a pair, or return None where they do not go together."""
        values = [getattr(side[0], kind)[:_LEAVES] for side in (pair.a, pair.b)]
        counts = [len(one) for one in values]
        if kind == "outputs" and counts[0] == counts[1] > 1:
            seen = [self._see_one(kind, pair, (i,), (i,)) for i in range(counts[0])]
            if all(one is not None for one in seen):
                return max((one for one in seen if one is not None), key=lambda one: one.ratio)
        tried = sorted(((i, j) for i in range(counts[0]) for j in range(counts[1])), key=sum)
        main = next((one for i, j in tried if (one := self._see_one(kind, pair, (i,), (j,)))), None)
        # One side may pass hidden and residual apart, the other their sum.
        sums = [picks for n, picks in ((1, ((0,), (0, 1))), (0, ((0, 1), (0,)))) if is_sum(values[n])]
        found = [main, *(self._see_one(kind, pair, *picks) for picks in sums)]
        return min((one for one in found if one is not None), key=lambda one: one.errors.total, default=None)

    def _see_one(self, kind: str, pair: Pair, *picks: tuple[int, ...]) -> Seen | None:
        values = self._values(kind, pair, *picks)
        if values is None:
            return None
        shape, *both = values
        errors = relative_errors(*both)
        floors: list[Errors] = []
        for number, *runs in self._measured:
            keys = [one.key for one in (pair.a, pair.b)[number]]
            if all(key in run for key in keys for run in runs):
                low, high = (value([run[key] for key in keys], kind, picks[number]) for run in runs)
                noise = None if low is None or high is None else self._tokens.pair(high, low)
                floors += [] if noise is None else [relative_errors(*noise)]
        floors = [one for one in floors if isfinite(one.total)]  # a low run may overflow
        eps = torch.finfo(self._coarse).eps
        least = eps / 4 if floors else 4 * eps
        scale = eps / torch.finfo(torch.float32).eps if self._coarse is torch.float64 else 1.0
        whole = max(least, scale * min((one.total for one in floors), default=0.0))
        worst = max(least, scale * min((one.largest for one in floors), default=0.0))
        return Seen(errors, whole, max(errors.total / whole, errors.largest / worst), shape, picks)

    def _values(
        self, kind: str, pair: Pair, *picks: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Tensor, Tensor] | None:
        """Return A's shape and the rows of both sides."""
        a, b = (value(side, kind, pick) for side, pick in zip((pair.a, pair.b), picks, strict=True))
        rows = None if a is None or b is None else self._tokens.pair(a, b)
        return None if rows is None or a is None else (a.shape, *rows)

    def _first(self, pairs: list[Pair]) -> tuple[bool | None, Event | None, Event | None, str]:
        """Return whether the models are equal, the first event that differs, the last before, and why none."""
        root = next((pair for pair in pairs if pair.a[0].parent is None), None)
        if root is None or self._seen["outputs", root] is None:
            return None, None, None, "the outputs of the two models have shapes that do not go together"
        if self._differs(("inputs", root)):
            return None, None, None, "the models were not given the same inputs"
        last = None
        for event in sorted(self._seen, key=lambda one: one[1].time(one[0], 0)):
            if self._seen[event] is None:
                continue
            if not self._differs(event):
                last = event
            elif (gone := self._gone(event)) is not None:
                self._remarks.append(f"{_spell(event)} differs, which is gone at {_spell(gone)}")
            else:
                why = "" if last else f"nothing could be compared before {_spell(event)}, which differs"
                return False, event, last, why
        return True, None, None, ""

    def _differs(self, event: Event) -> bool:
        seen = self._seen[event]
        return seen is not None and seen.ratio > self._factor

    def _gone(self, event: Event) -> Event | None:
        """Return the output at which the difference is gone, of the module or of one around it: a convention."""
        (kind, pair), seen = event, self._seen[event]
        for outer in reversed([pair for kind, pair in self._seen if kind == "outputs"]):
            is_same = outer is pair and kind == "inputs"
            if is_same or (outer.a[0].holds(pair.a[0]) and not self._differs(("inputs", outer))):
                after = self._seen["outputs", outer]
                if seen is None or after is None or self._differs(("outputs", outer)):
                    continue
                if seen.errors.total > _VANISHED * after.errors.total:
                    return "outputs", outer
        return None

    def _error(self, pair: Pair) -> ModuleError:
        before, after = (self._seen.get((kind, pair)) or self._see(kind, pair) for kind in _KINDS)
        along = None if after is None else by_token(after.errors.rows, after.shape)
        path_a, path_b = (", ".join(one.path for one in side) for side in (pair.a, pair.b))
        return ModuleError(
            path_a,
            path_b,
            pair.a[0].class_name,
            pair.b[0].class_name,
            None if before is None else before.errors.total,
            None if after is None else after.errors.total,
            0.0 if after is None else after.floor,
            () if along is None else tuple(along.tolist()),
        )


class _ModelComparer(Comparer):
    """Comparison of two models, which can be run in other precisions."""

    def __init__(self, models: tuple[_Model, _Model], tokens: Tokens, factor: float) -> None:
        super().__init__(models, tokens, factor)
        self._models = models

    def _measure(self) -> str:
        """Run the models in other precisions. Return in words how the floor was measured."""
        coarse = self._coarse
        low = torch.float32 if coarse is torch.float64 else coarse
        high = torch.float64 if low is torch.float32 else torch.float32
        for number, (side, other) in enumerate((self._models, self._models[::-1])):
            if FLOATS.index(side.dtype) > FLOATS.index(other.dtype):
                continue  # its weights are rounded already
            try:
                self._measured.append((number, side.run_in(low), side.run_in(high)))
            except Exception as error:  # of the user's code, which may know one precision only
                self._remarks.append(f"{'AB'[number]} did not run in {dtype_name(high)}: {spell(error)}")
        measured = " and ".join("AB"[number] for number, _, _ in self._measured)
        if not measured:
            return f"not measured, assumed to be 4 eps of {dtype_name(coarse)}"
        scaled = ", scaled to float64" if coarse is torch.float64 else ""
        return (
            f"rounding error of {measured}, run in {dtype_name(low)} and again in {dtype_name(high)}{scaled}"
        )


def _spell(event: Event) -> str:
    return f"the {event[0][:-1]} of {event[1].name}"
