"""The engine that compares two runs of calls: match the calls, compare their values, find the first that differs.

The runs come from two models (`compare.py`) or from two traces with sketches (`traces.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from ..numerics.readable import dtype_name
from .calls import CallPair, ModuleCall, alone, innermost, is_sum, part_of_difference, value
from .comparison import Comparison, ModuleError
from .differences import (
    Errors,
    Tokens,
    by_token,
    module_differences,
    relative_errors,
    shape_of_difference,
)
from .matching import CallMatcher
from .model_runs import FLOATS, Runs

# Leaves of a call's inputs or outputs that are tried against those of the other side.
_LEAVES = 4
# A difference that is this many times larger than what is left of it after the module is one of convention.
_VANISHED = 100.0
KINDS = ("inputs", "outputs")
# Outputs that are further apart are never equal, in units of the narrowest format. Products of 16 bits are summed in
# float32, those of others in the format itself. Pairs that compute the same stay below 0.5 and 4.
_UNITS_OF_16_BITS, _UNITS = 8, 64
# A difference that rounding of weights explains is within twice the error that the largest such rounding, with random
# signs, makes in a run.
_ROUNDED = 3.0


@dataclass(frozen=True)
class EventErrors:
    """Comparison of an event: the errors, the floor, and how many times the floor the error is."""

    errors: Errors
    floor: float
    ratio: float
    shape: tuple[int, ...]
    picks: tuple[tuple[int, ...], ...]


# Kind of values, and of which calls.
Event = tuple[str, CallPair]


class Side(Protocol):
    """Calls of one side of a comparison, in the order of their starts, and its dtype."""

    calls: list[ModuleCall]
    dtype: torch.dtype


class Comparer(ABC):
    """Comparison of the events of two runs, in the order of A, and the search for the first difference."""

    def __init__(self, sides: tuple[Side, Side], tokens: Tokens, factor: float) -> None:
        self._sides = sides
        self._tokens = tokens
        self._factor = factor
        self.coarse = self.narrowest = max((side.dtype for side in sides), key=FLOATS.index)
        self._remarks: list[str] = []
        # Side, and its runs in low and in high precision.
        self._measured: list[tuple[int, Runs, Runs]] = []
        # Side, and its runs with weights as they are and as rounding may have made them.
        self._rounded: list[tuple[int, Runs, Runs]] = []
        self._events: dict[Event, EventErrors | None] = {}
        # Differences that are gone later on, in words, by the kind of values and the calls of both sides.
        self._conventions: dict[tuple[Any, ...], str] = {}

    def compare(self) -> Comparison:
        """Return the result."""
        self._floor_words = self._measure()
        pairs = self._match()
        self._events = {(kind, pair): self._compare(kind, pair) for pair in pairs for kind in KINDS}
        equal, event, last, why = self._first(pairs)
        first, where, likely = None, "", list[str]()
        if event is not None and last is not None:
            pair, where = self._blame(event, last, pairs)
            first, likely = self._module_error(pair), self._looks_like(event, pair)
        rows = tuple(row for pair in pairs if (row := self._module_error(pair)).error is not None)
        calls_a, calls_b = (len(side.calls) for side in self._sides)
        return Comparison(
            equal, first, where, tuple(likely), why, self._floor_words, self._factor, calls_a, calls_b, rows,
            tuple(dict.fromkeys(self._remarks))[:5],
        )  # fmt: skip

    def _blame(self, event: Event, last: Event, pairs: list[CallPair]) -> tuple[CallPair, str]:
        """Return the innermost calls with the last event that agrees and the first that does not, and where in them."""
        kind, pair = event
        is_fed = self._events["inputs", pair] is not None or not (pair.a[0].inputs and pair.b[0].inputs)
        if kind == "outputs" and pair.a[0].is_leaf and is_fed:
            return pair, ""
        where = f"in its own code, between {_spell(last)}, which agrees, and {_spell(event)}, which does not"
        calls = [side.calls for side in self._sides]
        times = [sorted((last[1].time(last[0], i), pair.time(kind, i))) for i in (0, 1)]
        a, b = (innermost(calls[i], *times[i]) for i in (0, 1))
        if not (a.is_leaf or b.is_leaf):  # of a leaf nothing inside shows
            alone_a, alone_b = (alone(calls[i], pairs, *times[i]) for i in (0, 1))
            if alone_a and alone_b:
                where += f". There A calls {alone_a} and B {alone_b}, which were not matched: compare them"
            elif alone_a or alone_b:
                where += f". Only {'A' if alone_a else 'B'} calls {alone_a or alone_b} there"
        return CallPair((a,), (b,)), where

    def _looks_like(self, event: Event, pair: CallPair) -> list[str]:
        """Return in words what may make the difference of an event, for which a pair of calls is blamed."""
        words, errors = list[str](), self._events[event]
        modules = [call.module for call in (*pair.a, *pair.b) if call.module is not None]
        if len(modules) == 2:
            words = module_differences(*modules, is_leaf=pair.a[0].is_leaf)
        if errors is not None and (values := self._values(*event, *errors.picks)) is not None:
            parts = max(pair.a, pair.b, key=len)
            words += part_of_difference(parts, *values[1:], self._factor * errors.floor)
            words += shape_of_difference(*values[1:], errors.errors, errors.shape, errors.floor)
        return words

    @abstractmethod
    def _measure(self) -> str:
        """Fill `_measured`. Return in words how the floor was measured."""

    def _match(self) -> list[CallPair]:
        """Return the calls of both sides that compute the same, in the order of A."""
        a, b = self._sides
        return CallMatcher(a.calls, b.calls, self._tokens).match()

    def _compare(self, kind: str, pair: CallPair) -> EventErrors | None:
        """Compare the inputs or the outputs of a pair, or return None where they do not go together."""
        values = [getattr(side[0], kind)[:_LEAVES] for side in (pair.a, pair.b)]
        counts = [len(one) for one in values]
        if kind == "outputs" and counts[0] == counts[1] > 1:
            seen = [self._compare_values(kind, pair, (i,), (i,)) for i in range(counts[0])]
            if all(one is not None for one in seen):
                return max((one for one in seen if one is not None), key=lambda one: one.ratio)
        tried = sorted(((i, j) for i in range(counts[0]) for j in range(counts[1])), key=sum)
        main = next((one for i, j in tried if (one := self._compare_values(kind, pair, (i,), (j,)))), None)
        # One side may pass hidden and residual apart, the other their sum.
        sums = [picks for n, picks in ((1, ((0,), (0, 1))), (0, ((0, 1), (0,)))) if is_sum(values[n])]
        found = [main, *(self._compare_values(kind, pair, *picks) for picks in sums)]
        return min((one for one in found if one is not None), key=lambda one: one.errors.total, default=None)

    def _compare_values(self, kind: str, pair: CallPair, *picks: tuple[int, ...]) -> EventErrors | None:
        values = self._values(kind, pair, *picks)
        if values is None:
            return None
        shape, *both = values
        errors = relative_errors(*both)
        floors = self._noise(self._measured, kind, pair, picks)
        rounded = self._noise(self._rounded, kind, pair, picks)
        whole = self._floor([one.total for one in floors], [one.total for one in rounded])
        worst = self._floor([one.largest for one in floors], [one.largest for one in rounded])
        return EventErrors(errors, whole, max(errors.total / whole, errors.largest / worst), shape, picks)

    def _floor(self, noise: list[float], rounded: list[float]) -> float:
        """Return the noise floor, of the less noisy side, and what rounded weights make on both."""
        eps = torch.finfo(self.coarse).eps
        scale = eps / torch.finfo(torch.float32).eps if self.coarse is torch.float64 else 1.0
        least = eps / 4 if noise else 4 * eps
        return max(least, scale * min(noise, default=0.0)) + _ROUNDED / self._factor * hypot(*rounded)

    def _noise(
        self,
        measured: list[tuple[int, Runs, Runs]],
        kind: str,
        pair: CallPair,
        picks: Sequence[tuple[int, ...]],
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
        self, kind: str, pair: CallPair, *picks: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Tensor, Tensor] | None:
        """Return A's shape and the rows of both sides."""
        a, b = (value(side, kind, pick) for side, pick in zip((pair.a, pair.b), picks, strict=True))
        rows = None if a is None or b is None else self._tokens.pair(a, b)
        return None if rows is None or a is None else (a.shape, *rows)

    def _first(self, pairs: list[CallPair]) -> tuple[bool | None, Event | None, Event | None, str]:
        """Return whether the models are equal, the first event that differs, the last before, and why none."""
        root = next((pair for pair in pairs if pair.a[0].parent is None), None)
        if root is None or self._events["outputs", root] is None:
            return None, None, None, "the outputs of the two models have shapes that do not go together"
        if self._differs(("inputs", root)):
            return None, None, None, "the models were not given the same inputs"
        last = None
        for event in sorted(self._events, key=lambda one: one[1].time(one[0], 0)):
            if self._events[event] is None:
                continue
            if not self._differs(event):
                last = event
            elif (words := self._convention(event)) is not None:
                self._remarks.append(words)
            else:
                why = "" if last else f"nothing could be compared before {_spell(event)}, which differs"
                return False, event, last, why
        # The runs that the noise was measured in may have the fault too.
        error, name = self._events["outputs", root], dtype_name(self.narrowest)
        units = _UNITS if torch.finfo(self.narrowest).bits > 16 else _UNITS_OF_16_BITS
        if error is not None and error.errors.total > units * torch.finfo(self.narrowest).eps:
            size = f"the outputs are {error.errors.total:.2g} apart, more than {units} units of {name}"
            return False, None, None, f"{size}, and what the noise was measured with is as far off"
        return True, None, None, ""

    def _differs(self, event: Event) -> bool:
        seen = self._events[event]
        return seen is not None and seen.ratio > self._factor

    def _convention(self, event: Event) -> str | None:
        """Return in words where the difference is gone: at the output of the module or of one around it."""
        kind, pair = event
        key = (kind, *(tuple(one.key for one in side) for side in (pair.a, pair.b)))
        if (gone := self._gone(event)) is not None:
            self._conventions[key] = f"{_spell(event)} differs, which is gone at {_spell(gone)}"
        return self._conventions.get(key)

    def _gone(self, event: Event) -> Event | None:
        (kind, pair), seen = event, self._events[event]
        for outer in reversed([pair for kind, pair in self._events if kind == "outputs"]):
            is_same = outer is pair and kind == "inputs"
            if is_same or (outer.a[0].holds(pair.a[0]) and not self._differs(("inputs", outer))):
                after = self._events["outputs", outer]
                if seen is None or after is None or self._differs(("outputs", outer)):
                    continue
                if seen.errors.total > _VANISHED * after.errors.total:
                    return "outputs", outer
        return None

    def _module_error(self, pair: CallPair) -> ModuleError:
        before, after = (self._events.get((kind, pair)) or self._compare(kind, pair) for kind in KINDS)
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


def _spell(event: Event) -> str:
    return f"the {event[0][:-1]} of {event[1].name}"
