"""`nanwatch.compare`: the first module in which two implementations of one model differ by more than rounding does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..numerics.readable import dtype_name
from ..util.visible import spell
from .calls import Call, Matcher, Pair, alone, innermost, is_sum, part_of_difference, value
from .differences import (
    Errors,
    Tokens,
    are_apart,
    by_token,
    module_differences,
    parameter_differences,
    relative_errors,
    shape_of_difference,
)
from .model_runs import FLOATS, Caller, ModelRuns, Runs, rounded_apart
from .results import Comparison, ModuleError, spell_error
from .state import State

# Leaves of a call's inputs or outputs that are tried against those of the other side.
_LEAVES = 4
# A difference that is this many times larger than what is left of it after the module is one of convention.
_VANISHED = 100.0
_KINDS = ("inputs", "outputs")
# A difference that rounding of weights explains is within twice the error that the largest such rounding, with random
# signs, makes in a run.
_ROUNDED = 3.0


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
    copied. Models of two precisions are held to the coarser one. The copies of 16-bit models are compared too, in
    float32: a difference that rounding hides is told with `equal_in`. A leaf with another parameter is never equal.

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
        a = ModelRuns(model_a, call_a, inputs, state, most_bytes)
        b = ModelRuns(model_b, call_b, inputs, state, most_bytes)
        comparer = _ModelComparer((a, b), Tokens(tokens), factor)
        precise = comparer.compare_copies()
        found = _with_copies(comparer.compare(), precise, dtype_name(comparer.coarse))
        return comparer.with_parameters(found) if found.equal else found


def _with_copies(found: Comparison, precise: Comparison | None, name: str) -> Comparison:
    """Return what the comparison of two models in the dtype `name` and that of their float32 copies say together."""
    if precise is None or found.equal is None:
        return found
    if found.equal and precise.equal is False:
        return replace(precise, equal_in=name)
    if found.equal is False and precise.equal:
        only = f"the float32 copies are equal: look at dtypes, and at the order of what {name} rounds"
        return replace(found, remarks=(*found.remarks, only))
    if found.equal or precise.first is None:
        return found
    if found.first is None or found.first.name != precise.first.name:
        first = found.why if found.first is None else f"{found.first.name}, {spell_error(found.first.error)}"
        return replace(
            precise,
            remarks=(f"this is of float32 copies; in {name} they differ first in {first}", *precise.remarks),
        )
    return replace(found, where=precise.where, likely=precise.likely)


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
        self.coarse = max((side.dtype for side in sides), key=FLOATS.index)
        self._remarks: list[str] = []
        # Side, and its runs in low and in high precision.
        self._measured: list[tuple[int, Runs, Runs]] = []
        # Side, and its runs with weights as they are and as rounding may have made them.
        self._rounded: list[tuple[int, Runs, Runs]] = []
        self._seen: dict[Event, Seen | None] = {}
        # Differences that are gone later on, in words, by the kind of values and the calls of both sides.
        self._conventions: dict[tuple[Any, ...], str] = {}

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
            tuple(dict.fromkeys(self._remarks))[:5],
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
        floors = self._noise(self._measured, kind, pair, picks)
        rounded = self._noise(self._rounded, kind, pair, picks)
        whole = self._floor([one.total for one in floors], [one.total for one in rounded])
        worst = self._floor([one.largest for one in floors], [one.largest for one in rounded])
        return Seen(errors, whole, max(errors.total / whole, errors.largest / worst), shape, picks)

    def _floor(self, noise: list[float], rounded: list[float]) -> float:
        """Return the noise floor, of the less noisy side, and what rounded weights make on both."""
        eps = torch.finfo(self.coarse).eps
        scale = eps / torch.finfo(torch.float32).eps if self.coarse is torch.float64 else 1.0
        least = eps / 4 if noise else 4 * eps
        return max(least, scale * min(noise, default=0.0)) + _ROUNDED / self._factor * hypot(*rounded)

    def _noise(
        self, measured: list[tuple[int, Runs, Runs]], kind: str, pair: Pair, picks: Sequence[tuple[int, ...]]
    ) -> list[Errors]:
        """Return the errors between the runs of each side that has been measured."""
        found = []
        for number, *runs in measured:
            keys = [one.key for one in (pair.a, pair.b)[number]]
            if all(key in run for key in keys for run in runs):
                low, high = (value([run[key] for key in keys], kind, picks[number]) for run in runs)
                noise = None if low is None or high is None else self._tokens.pair(high, low)
                found += [] if noise is None else [relative_errors(*noise)]
        return [one for one in found if isfinite(one.total)]  # a low run may overflow

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
            elif (words := self._convention(event)) is not None:
                self._remarks.append(words)
            else:
                why = "" if last else f"nothing could be compared before {_spell(event)}, which differs"
                return False, event, last, why
        return True, None, None, ""

    def _differs(self, event: Event) -> bool:
        seen = self._seen[event]
        return seen is not None and seen.ratio > self._factor

    def _convention(self, event: Event) -> str | None:
        """Return in words where the difference is gone: at the output of the module or of one around it."""
        kind, pair = event
        key = (kind, *(tuple(one.key for one in side) for side in (pair.a, pair.b)))
        if (gone := self._gone(event)) is not None:
            self._conventions[key] = f"{_spell(event)} differs, which is gone at {_spell(gone)}"
        return self._conventions.get(key)

    def _gone(self, event: Event) -> Event | None:
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

    def __init__(self, models: tuple[ModelRuns, ModelRuns], tokens: Tokens, factor: float) -> None:
        super().__init__(models, tokens, factor)
        self._models = models

    def compare_copies(self) -> Comparison | None:
        """Compare the float32 copies of 16-bit models. Take over what they show of rounding and of conventions."""
        if torch.finfo(self.coarse).bits > 16:
            return None
        stored = max((one.stored for one in self._models), key=FLOATS.index)
        made = []
        for name, one in zip("AB", self._models, strict=True):
            try:
                made.append(one.copied(torch.float32, stored))
            except Exception as error:  # of the user's code, which may know one precision only
                self._remarks.append(f"{name} did not run in float32: {spell(error)}")
        if len(made) < 2:
            return None
        copies = _CopiesComparer((made[0], made[1]), self._tokens, self._factor)
        found = copies.compare()
        self._rounded, self._conventions = copies._rounded, copies._conventions
        return found

    def with_parameters(self, found: Comparison) -> Comparison:
        """Return the result for equal outputs, which a parameter or an eps that a leaf has alone makes unequal."""
        where = (
            "in its own parameters or eps; with these inputs the model's output shows no more than rounding"
        )
        pairs = list(dict.fromkeys(pair for _, pair in self._seen))
        apart = {pair.a[0].path for pair in pairs if are_apart(*pair.modules)}
        for pair in pairs:
            is_leaf = all(one.is_leaf for one in (*pair.a, *pair.b))
            is_agreed = not any(self._differs((kind, pair)) for kind in _KINDS)
            # What makes up for another weight is another module too.
            is_alone = apart == {pair.a[0].path}
            words = parameter_differences(*pair.modules) if is_leaf and (is_agreed or is_alone) else []
            if words:
                return replace(found, equal=False, first=self._error(pair), where=where, likely=tuple(words))
        return found

    def _measure(self) -> str:
        """Run the models in other precisions. Return in words how the floor was measured."""
        coarse = self.coarse
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


class _CopiesComparer(_ModelComparer):
    """Comparison of float32 copies of 16-bit models. What was rounded when the models were made adds to the noise."""

    _words = ""

    def compare(self) -> Comparison:
        """Return the result."""
        found = super().compare()
        return replace(found, floor=found.floor + self._words)

    def _match(self) -> list[Pair]:
        pairs = super()._match()
        for number, keys in enumerate(rounded_apart(pairs, self._models)):
            if keys:
                side = self._models[number]
                self._rounded.append((number, side.run_in(side.dtype), side.shaken(keys)))
                name = ".".join(filter(None, keys[0])) + (
                    f" and {len(keys) - 1} more" if len(keys) > 1 else ""
                )
                self._words += f"; rounding of {name}, which {'AB'[1 - number]} has not so"
        return pairs


def _spell(event: Event) -> str:
    return f"the {event[0][:-1]} of {event[1].name}"
