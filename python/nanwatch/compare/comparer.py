"""Comparison of two runs of calls: compare the values of each pair, and find the first that leaves the noise.

The runs come from two models (`models.py`) or from two traces with sketches (`traces.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics.readable import dtype_name
from ..trace.result import Comparison, Place, plural
from ..util.visible import module_name
from .calls import SUM, CallPair, Errors, ModuleCall, Run, Tokens, errors_between
from .words import module_differences, shape_of_difference

# A difference that is this many times larger than what is left of it after the module is one of convention.
_VANISHED = 100.0
_KINDS = ("inputs", "outputs")
# Outputs that are further apart are never equal, in units of the narrowest format. Products of 16 bits are summed in
# float32, those of others in the format itself. Pairs that compute the same stay below 0.5 and 4.
_UNITS_OF_16_BITS, _UNITS = 8, 64
# A difference that rounding of weights explains is within twice the error that the largest such rounding, with random
# signs, makes in a run.
_ROUNDED = 3.0
_MOST_REMARKS = 5
# Kind of values, and of which calls.
Event = tuple[str, CallPair]
# Side, and two runs of its model between which the error is noise.
NoiseRuns = Sequence[tuple[int, Run, Run]]


class Noise(NamedTuple):
    """How the noise floor was measured.

    `coarse` is the precision that both sides have at least, and `narrowest` that of their weights too. `runs` are in
    low precision and in high precision, and `words` say so. `shaken` are runs without and with weights as far away as
    rounding may have put them.
    """

    coarse: torch.dtype
    narrowest: torch.dtype
    runs: NoiseRuns
    words: str
    shaken: NoiseRuns = ()

    def floor(self, errors: list[float], shaken: list[float], factor: float) -> float:
        """Return the floor by the rounding errors of the less noisy side, and by what shaken weights make of both."""
        eps = torch.finfo(self.coarse).eps
        # float64 is measured by float32, as nothing is more precise.
        scale = eps / torch.finfo(torch.float32).eps if self.coarse is torch.float64 else 1.0
        least = max(eps / 4, scale * min(errors)) if errors else 4 * eps
        return least + _ROUNDED / factor * hypot(*shaken)


class Verdict(NamedTuple):
    """Whether two runs are equal, and the first module whose inputs agree and whose outputs do not.

    `first` is None where there is none, with the reason in `why`. `where` says where in it the difference begins,
    `likely` what it looks like. `hidden_by` is the 16-bit dtype whose rounding hides a difference of float32 copies.
    """

    comparer: Comparer
    equal: bool | None
    first: Place | None = None
    where: str = ""
    likely: Sequence[str] = ()
    why: str = ""
    remarks: Sequence[str] = ()
    hidden_by: str = ""


class Comparer:
    """Comparison of the events of two runs, in the order of A, and the search for the first difference.

    `conventions` has the differences that are gone later on, in words, by the kind of values and the keys of the calls.
    """

    def __init__(
        self,
        calls: Sequence[Sequence[ModuleCall]],
        pairs: list[CallPair],
        tokens: Tokens,
        factor: float,
        noise: Noise,
        conventions: dict[Any, str],
        remarks: Sequence[str] = (),
    ) -> None:
        self.pairs = pairs
        self._remarks = [*remarks]
        self._calls = calls
        self._tokens = tokens
        self._factor = factor
        self._noise = noise
        self._conventions = conventions
        self._events = {(kind, pair): self._compare(kind, pair) for pair in pairs for kind in _KINDS}

    def compare(self) -> Verdict:
        """Search for the first module that differs."""
        verdict = self._search()
        return verdict._replace(remarks=[*dict.fromkeys(self._remarks)][:_MOST_REMARKS])

    def result(self, verdict: Verdict) -> Comparison:
        """Return a verdict for users, with the errors of all modules."""
        first, facts = verdict.first, list[tuple[str, str]]()
        headline = (
            "Equal within the noise floor" if verdict.equal else f"No module can be named: {verdict.why}"
        )
        if first is not None:
            size = _spell_error(first.error)
            copies = f"Equal in {verdict.hidden_by}; the float32 copies differ first in {first.name}, {size}"
            headline = copies if verdict.hidden_by else f"Differ first in {first.name}"
            if first.error is not None and first.limit is not None:
                side = "above" if first.error > first.limit else "within"
                size += f", {side} {self._factor:g} x the floor of {first.limit / self._factor:.2g}"
            facts = [("Input", _spell_error(first.input_error)), ("Output", size), ("Where", verdict.where)]
        facts += [*(("Looks like", words) for words in verdict.likely), ("Noise", self._noise.words)]
        facts = [(head, words) for head, words in facts if words]
        places = tuple(place for pair in self.pairs if (place := self.place(pair)).error is not None)
        calls_a, calls_b = (len(calls) for calls in self._calls)
        compared = f"{plural(len(places), 'pair')} of module calls (A made {calls_a:,} calls, B {calls_b:,})"
        return Comparison(
            verdict.equal, headline, first, tuple(facts), compared, tuple(verdict.remarks), places
        )

    def agrees(self, pair: CallPair) -> bool:
        """Return whether neither inputs nor outputs of the pair are above the noise."""
        return not any(self._differs((kind, pair)) for kind in _KINDS)

    def spreads(self) -> bool:
        """Return whether the input of a leaf is above the noise."""
        return any(self._differs(("inputs", pair)) for pair in self.pairs if pair.is_leaf)

    def place(self, pair: CallPair) -> Place:
        """Return the errors of a pair, which need not be one of those that were matched."""
        a, b = pair
        before, after = (self._events.get((kind, pair)) or self._compare(kind, pair) for kind in _KINDS)
        place = Place(a.path, b.path, a.class_name, b.class_name, input_error=before and before.total)
        if after is None:
            return place
        return place._replace(
            error=after.total,
            limit=self._factor * after.floor,
            cosine=after.cosine,
            largest_difference=after.largest_difference,
        )

    # The search.

    def _differs(self, event: Event) -> bool:
        """Return whether an event is above the noise."""
        errors = self._events[event]
        return errors is not None and errors.ratio > self._factor

    def _search(self) -> Verdict:
        """Go through the events in the order of A until one differs."""
        root = next((pair for pair in self.pairs if pair.a.parent is None), None)
        result = None if root is None else self._events["outputs", root]
        if root is None or result is None:
            return Verdict(
                self, None, why="the outputs of the two models have shapes that do not go together"
            )
        if self._differs(("inputs", root)):
            words = "; ".join(self._looks_like(("inputs", root), root))
            return Verdict(
                self, None, why=f"the models were not given the same inputs{words and f' ({words})'}"
            )
        last, largest = None, 0.0
        for event in sorted(self._events, key=lambda event: event[1].a.time(event[0])):
            errors = self._events[event]
            if errors is None:
                continue
            if not self._differs(event):
                last = event
            elif words := self._convention(event, errors):
                self._remarks.append(words)
            elif not self._noise.runs and errors.total <= self._factor * largest:
                grown = f"from {largest:.2g} to {errors.total:.2g} at {event[1].name} without a jump"
                why = f"the error grows {grown}, as rounding does, and the floor is not known"
                return Verdict(self, None, why=why)
            elif last is None:
                return Verdict(
                    self, False, why=f"nothing could be compared before {_spell(event)}, which differs"
                )
            else:
                pair, where = self._blame(event, last)
                return Verdict(self, False, self.place(pair), where, self._looks_like(event, pair))
            largest = max(largest, errors.total)
        # The runs that the noise was measured in may have the fault too.
        narrowest = torch.finfo(self._noise.narrowest)
        units = _UNITS if narrowest.bits > 16 else _UNITS_OF_16_BITS
        if result.total > units * narrowest.eps:
            apart = (
                f"{result.total:.2g} apart, more than {units} units of {dtype_name(self._noise.narrowest)}"
            )
            why = f"the outputs are {apart}, and what measured the noise is as far off"
            return Verdict(self, False, why=why)
        return Verdict(self, True)

    def _convention(self, event: Event, errors: Errors) -> str:
        """Return in words where the difference is gone: at the output of the module or of one around it."""
        kind, pair = event
        key = (kind, *(call.key for call in pair))
        for outer in reversed(self.pairs):
            is_around = outer.a.holds(pair.a) and not self._differs(("inputs", outer))
            after = self._events["outputs", outer]
            if after is None or not (is_around or (outer is pair and kind == "inputs")):
                continue
            if after.ratio <= self._factor and errors.total > _VANISHED * after.total:
                gone = _spell(("outputs", outer))
                self._conventions[key] = f"{_spell(event)} differs, which is gone at {gone}"
                break
        return self._conventions.get(key, "")

    def _blame(self, event: Event, last: Event) -> tuple[CallPair, str]:
        """Return the innermost calls with the last event that agrees and the first that does not, and where in them."""
        kind, pair = event
        is_fed = self._events["inputs", pair] is not None or not (pair.a.inputs and pair.b.inputs)
        if kind == "outputs" and pair.a.is_leaf and is_fed:
            return pair, ""
        where = f"in its own code, between {_spell(last)}, which agrees, and {_spell(event)}, which does not"
        times = [
            sorted((before.time(last[0]), after.time(kind)))
            for before, after in zip(last[1], pair, strict=True)
        ]
        a, b = (
            [call for call in calls if call.start <= start and call.end >= end][-1]  # the innermost
            for calls, (start, end) in zip(self._calls, times, strict=True)
        )
        return CallPair(a, b), where

    def _looks_like(self, event: Event, pair: CallPair) -> list[str]:
        """Return in words what may make the difference of an event, for which a pair of calls is blamed."""
        (kind, calls), errors, parts = event, self._events[event], pair.a.parts or pair.b.parts
        words = [] if parts or event == ("inputs", pair) else module_differences(pair)
        if errors is not None and (rows := self._rows(kind, calls, errors.values)) is not None:
            words += _part_of_difference(parts, *rows, self._factor * errors.floor)
            first = calls.a.value(kind, errors.values[0])
            words += shape_of_difference(*rows, errors, () if first is None else first.shape)
        return words

    # The errors of an event.

    def _compare(self, kind: str, pair: CallPair) -> Errors | None:
        """Compare the inputs or the outputs of a pair, or return None where they do not go together."""
        count_a, count_b = (len(call.values(kind)) for call in pair)
        if kind == "outputs" and count_a == count_b > 1:
            each = [errors for i in range(count_a) if (errors := self._compare_values(kind, pair, (i, i)))]
            if len(each) == count_a:
                return max(each, key=lambda errors: errors.ratio)
        tried = sorted(((i, j) for i in range(count_a) for j in range(count_b)), key=sum)
        main = (errors for values in tried if (errors := self._compare_values(kind, pair, values)))
        # One side may pass hidden and residual apart, the other their sum.
        sums = (self._compare_values(kind, pair, values) for values in ((SUM, 0), (0, SUM)))
        candidates = [errors for errors in (next(main, None), *sums) if errors is not None]
        return min(candidates, key=lambda errors: errors.total, default=None)

    def _compare_values(self, kind: str, pair: CallPair, values: tuple[int, int]) -> Errors | None:
        rows = self._rows(kind, pair, values)
        if rows is None:
            return None
        errors = errors_between(*rows)
        noise, shaken = (
            self._errors_of(runs, kind, pair, values) for runs in (self._noise.runs, self._noise.shaken)
        )
        whole, worst = (
            self._noise.floor([getattr(x, of) for x in noise], [getattr(x, of) for x in shaken], self._factor)
            for of in ("total", "worst_row")
        )
        ratio = max(errors.total / whole, errors.worst_row / worst)
        return errors._replace(floor=whole, ratio=ratio, values=values)

    def _errors_of(self, runs: NoiseRuns, kind: str, pair: CallPair, values: tuple[int, int]) -> list[Errors]:
        """Return the errors between the two runs of each side."""
        noise = []
        for side, low_run, high_run in runs:
            low, high = pair[side].in_run(low_run), pair[side].in_run(high_run)
            if low is not None and high is not None:
                rows = self._rows(kind, (high, low), (values[side],) * 2)
                noise += [] if rows is None else [errors_between(*rows)]
        return [errors for errors in noise if isfinite(errors.total)]  # a low run may overflow

    def _rows(
        self, kind: str, calls: tuple[ModuleCall, ModuleCall], values: tuple[int, int]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the rows of two values of two calls."""
        a, b = (call.value(kind, index) for call, index in zip(calls, values, strict=True))
        return self._tokens.pair(a, b)


def _part_of_difference(parts: Sequence[ModuleCall], a: Tensor, b: Tensor, limit: float) -> list[str]:
    """Return in words which of the calls beside a fused one differ, unless all do."""
    widths = [call.outputs[0].shape[-1] for call in parts if call.outputs]
    if sum(widths) != a.shape[-1]:
        return []
    both = zip(a.split(widths, -1), b.split(widths, -1), strict=True)
    errors = [errors_between(*columns).total for columns in both]
    off = [module_name(call.path) for call, error in zip(parts, errors, strict=True) if error > limit]
    return [f"in {', '.join(off)} only"] if 0 < len(off) < len(parts) else []


def _spell(event: Event) -> str:
    return f"the {event[0][:-1]} of {event[1].name}"


def _spell_error(error: float | None) -> str:
    return "not comparable" if error is None else f"{error:.2g}"
