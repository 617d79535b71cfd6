"""Comparison of two traces with sketches, as of two engines: the first module whose outputs differ.

Modules are matched by name, by the ranges of their weights (also those of a fused projection), and by class, order and
sketches. Outputs are compared by their sketches, hidden and residual also by their sum. A trace has ranges of inputs
alone, so inputs are compared by their smallest and largest magnitudes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch

from ..numerics.readable import dtype_name
from ..records.fields import sizes
from ..trace.trace_file import Trace, sketches
from ..util.visible import first_few, module_name
from .calls import CallPair, ModuleCall
from .comparison import Comparison
from .differences import KeptTensor, Tokens, relative_errors
from .engine import Comparer, Event, EventErrors
from .matching import CallMatcher
from .model_runs import FLOATS, most_common

_COLUMNS = (
    "call", "module", "class", "label", "role", "shape", "dtype", "abs_min", "abs_max", "phase", "recomputed", "sketch",
)  # fmt: skip
# Time between the ends of two calls, in which there is room for the starts of as many containers around one call.
_TICKS = 1 << 20


class _Weight(NamedTuple):
    """Range of a weight. Those of the parts of a fused weight make up its own."""

    numel: int
    dtype: torch.dtype
    low: float
    high: float


@dataclass
class TraceCalls:
    """Calls of one batch of a trace, with the sketches of their outputs, and the weights of those that have one."""

    path: str
    calls: list[ModuleCall] = field(default_factory=list)
    weights: dict[ModuleCall, _Weight] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, trace: Trace, batch: int) -> TraceCalls:
        """Read a batch."""
        rows = trace.table(_COLUMNS, [batch]).to_pylist()
        rows = [row for row in rows if row["phase"] == "forward" and not row["recomputed"]]
        rows.sort(key=lambda row: row["call"])
        found = cls(str(trace.path))
        occurrences: Counter[str] = Counter()
        dtypes: list[torch.dtype] = []
        outermost: list[ModuleCall] = []  # of the calls so far
        for end, (_, frame) in enumerate(groupby(rows, key=lambda row: row["call"]), 1):
            records = list(frame)
            path = records[0]["module"]
            # A call is recorded when it ends, so its parts come before it.
            first = len(outermost)
            while first and (not path or outermost[first - 1].path.startswith(f"{path}.")):
                first -= 1
            inside = outermost[first:]
            start = (inside[0].start if inside else end * _TICKS) - 1
            call = ModuleCall(
                (path, occurrences[path]), records[0]["class"], None, None, start, end * _TICKS, not inside
            )
            for one in inside:
                one.parent = call
            outermost[first:] = [call]
            occurrences[path] += 1
            found.calls.append(call)
            for record in records:
                dtypes += found._add(call, record)
        if not found.calls:
            raise ValueError(f"{trace.path} has no call in batch {batch}")
        if len(outermost) > 1:  # the whole model was not watched
            root = ModuleCall(("", 0), "", None, None, -1, 1 << 62, False, outputs=outermost[-1].outputs)
            for one in outermost:
                one.parent = root
            found.calls.append(root)
        found.calls.sort(key=lambda one: one.start)
        found.dtype = most_common(dtypes, torch.float32)
        return found

    def _add(self, call: ModuleCall, record: dict[str, Any]) -> Iterator[torch.dtype]:
        """Put a record into its call. Yield the dtype of an output that has a sketch."""
        shape, low, high = sizes(record["shape"], "shape"), record["abs_min"], record["abs_max"]
        dtype: Any = getattr(torch, record["dtype"] or "", None)
        if shape is None or low is None or high is None:
            return
        if record["role"] == "input":
            ends = torch.tensor([[low, high]], dtype=torch.float64)
            call.inputs.append(KeptTensor((2,), ends, is_sketch=False))
        elif record["role"] == "output" and record["sketch"]:
            call.outputs.append(KeptTensor(shape, torch.tensor(sketches(record["sketch"])), is_sketch=True))
            yield dtype
        elif record["label"] == "weight" and dtype in FLOATS:
            # One number throughout, as in a new norm, tells no weight from another. Two ranges tell that they differ.
            if low < high:
                self.weights[call] = _Weight(prod(shape), dtype, low, high)
            else:
                call.weight_shape = shape


class _TraceMatcher(CallMatcher):
    """Search that knows weights by their ranges."""

    def __init__(self, a: TraceCalls, b: TraceCalls) -> None:
        super().__init__(a.calls, b.calls, Tokens(None))
        self._weights = {**a.weights, **b.weights}

    def _have_same_weight(self, a: ModuleCall, b: ModuleCall) -> bool:
        return self._are_parts((a,), b)

    def _fused(
        self, ones: Sequence[ModuleCall], others: Sequence[ModuleCall]
    ) -> Iterator[tuple[tuple[ModuleCall, ...], ModuleCall]]:
        """Yield two to four calls of one input, and the call whose weight has the ranges of theirs."""
        for other in (one for one in self._left(others) if one in self._weights):
            left = [one for one in self._left(ones) if one in self._weights and one.inputs]
            groups = (left[i : i + n] for n in (2, 3, 4) for i in range(len(left) - n + 1))
            fits = (
                one
                for one in groups
                if self._are_parts(one, other)
                and all(torch.equal(call.inputs[0].rows, one[0].inputs[0].rows) for call in one)
            )
            if (found := next(fits, None)) is not None:
                yield tuple(found), other

    def _are_parts(self, parts: Sequence[ModuleCall], whole: ModuleCall) -> bool:
        weights = [self._weights.get(one) for one in (*parts, whole)]
        known = [one for one in weights if one is not None]
        if len(known) < len(weights) or sum(one.numel for one in known[:-1]) != known[-1].numel:
            return False
        # Rounding keeps the order of numbers, so the ends of a range are rounded as the elements are.
        coarse = max((one.dtype for one in known), key=FLOATS.index)
        lows, highs = (
            torch.tensor(ends).to(coarse) for ends in zip(*(one[2:] for one in known), strict=True)
        )
        return bool(lows[:-1].min() == lows[-1] and highs[:-1].max() == highs[-1])


class _TraceComparer(Comparer):
    """Comparison of two traces, with the floor of a third one where there is one."""

    def __init__(self, a: TraceCalls, b: TraceCalls, reference: TraceCalls | None, factor: float) -> None:
        super().__init__((a, b), Tokens(None), factor)
        self._recorded = (a, b)
        self._reference = reference
        self._input_floor = 4 * torch.finfo(self.coarse).eps

    def compare(self) -> Comparison:
        """Return the result, which owns up to how little is known of inputs."""
        found = super().compare()
        if found.first is None or found.where:
            return found
        return replace(
            found, where="in it, or in the code that makes its input, of which a trace has the range alone"
        )

    def _measure(self) -> str:
        own = self._recorded[0].dtype
        if self._reference is None or own is not self.coarse:
            advice = "a third trace, of A in higher precision, would measure it"
            if own is not self.coarse:
                advice = f"A is in {dtype_name(own)}, and what measures it says nothing about B"
            return f"not measured, assumed to be 4 eps of {dtype_name(self.coarse)}; {advice}"
        low, high = ({one.key: one for one in side.calls} for side in (self._recorded[0], self._reference))
        self._measured.append((0, low, high))
        return f"rounding error of A, against {self._reference.path}"

    def _match(self) -> list[CallPair]:
        pairs = _TraceMatcher(*self._recorded).match()
        seen = [(pair, super(_TraceComparer, self)._compare("outputs", pair)) for pair in pairs]
        # The noise of one element may be 0 by chance, that of all is known.
        self._input_floor = max((one.floor for _, one in seen if one is not None), default=self._input_floor)
        fused = [pair.name for pair, one in seen if one is None and len(pair.a) != len(pair.b)]
        if fused:
            why = "the sketches of parts do not make up that of the whole"
            rest = f", and {len(fused) - 1} more," if len(fused) > 1 else ""
            self._remarks.append(f"{fused[0]}{rest} are matched by their weights and not compared: {why}")
        return pairs

    def _compare(self, kind: str, pair: CallPair) -> EventErrors | None:
        if kind == "outputs":
            return super()._compare(kind, pair)
        floor, given = self._input_floor, [side[0].inputs for side in (pair.a, pair.b)]
        # Positions or a mask may agree where the hidden state does not, so each input of one side needs a counterpart.
        fewer, more = sorted(given, key=len)
        found = [[relative_errors(x.rows, y.rows) for y in more] for x in fewer]
        nearest = (min(row, key=lambda one: one.total) for row in found)
        errors = max(nearest, default=None, key=lambda one: one.total)
        # Where one side gives hidden and residual apart, their sum is not known.
        is_known = len(given[0]) == len(given[1]) or (errors and errors.total <= self._factor * floor)
        return (
            EventErrors(errors, floor, errors.total / floor, (), ((0,), (0,)))
            if errors and is_known
            else None
        )

    def _values(self, kind: str, pair: CallPair, *picks: tuple[int, ...]) -> Any:
        return None if kind == "inputs" else super()._values(kind, pair, *picks)

    def _first(self, pairs: list[CallPair]) -> tuple[bool | None, Event | None, Event | None, str]:
        equal, event, last, why = super()._first(pairs)
        if event is None:
            return equal, event, last, why
        time, seen = event[1].time(event[0], 0), self._events[event]
        before = [
            one.errors.total
            for (kind, pair), one in self._events.items()
            if one is not None and pair.time(kind, 0) < time
        ]
        largest, where = max(before, default=0.0), module_name(event[1].a[0].path)
        if seen is not None and not self._measured and seen.errors.total <= self._factor * largest:
            grown = f"the error grows from {largest:.2g} to {seen.errors.total:.2g} at {where}"
            return None, None, None, f"{grown} without a jump, as rounding does, and the floor is not known"
        matched = {id(one) for pair in pairs if self._events["outputs", pair] is not None for one in pair.a}
        start = last[1].time(last[0], 0) if last is not None else -1
        skipped = [
            module_name(one.path)
            for one in self._sides[0].calls
            if start < one.start and one.end < time and one.is_leaf and id(one) not in matched
        ]
        if skipped:
            self._remarks.insert(0, f"before it, nothing was compared of {first_few(skipped)}")
        return equal, event, last, why


def compare_traces(
    a: Trace,
    b: Trace,
    reference: Trace | None = None,
    *,
    batches: tuple[int, int] | None = None,
    factor: float = 8.0,
) -> Comparison:
    """Name the first module whose outputs differ between two traces that have sketches.

    `batches` are those of A and of B; by default the first with sketches that both have. `reference` is a trace of A in
    higher precision, from which the noise floor is measured; its batch is that of A. Without one a difference must also
    be a jump. Raise ValueError for traces without sketches.
    """
    if not factor > 1:
        raise ValueError(f"factor should be above 1, the noise floor itself, got {factor}")
    for trace in (a, b):
        if not trace.sketched_batches:
            raise ValueError(
                f"{trace.path} has no sketches; record it with watch(trace=nanwatch.Trace(path, sketches=N))"
            )
    if batches is None:
        both = sorted({*a.sketched_batches} & {*b.sketched_batches})
        if not both:
            raise ValueError(
                f"no batch of {a.path} and {b.path} has sketches in both; name one of each with batches"
            )
        batches = both[0], both[0]
    one, other = TraceCalls.of(a, batches[0]), TraceCalls.of(b, batches[1])
    precise = None if reference is None else TraceCalls.of(reference, batches[0])
    return _TraceComparer(one, other, precise, factor).compare()
