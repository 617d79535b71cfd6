"""Comparison of two traces with sketches, as of two engines: the first module whose outputs differ.

Modules are matched by name, by the ranges of their weights (also those of a fused projection), and by order, class,
shape and sketches. Outputs are compared by their sketches, hidden and residual also by their sum. A trace has ranges of
inputs alone, so inputs are compared by their smallest and largest magnitudes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..numerics.readable import dtype_name
from ..records.fields import sizes
from ..trace.trace_file import Trace, in_order, sketches, strings
from ..util.modules import is_in
from ..util.visible import module_name
from .calls import ModuleCall
from .comparer import Comparer, Noise, TwoRuns
from .comparison import Comparison
from .matching import match_calls
from .model_runs import most_common
from .models import check_factor
from .tensors import FLOATS, KeptTensor, Tokens

_TEXTS = ("module", "class", "label", "role", "shape", "dtype", "phase")
_NUMBERS = ("batch", "call", "abs_min", "abs_max", "recomputed", "sketch")
# Time between the ends of two calls, in which there is room for the starts of as many containers around one call.
_TICKS = 1 << 20


class _Range(NamedTuple):
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
    weights: dict[ModuleCall, _Range] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    _occurrences: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, trace: Trace, batch: int) -> TraceCalls:
        """Read a batch."""
        table = in_order(trace.table((*_NUMBERS, *_TEXTS), [batch]))
        texts = {name: strings(table[name]) for name in _TEXTS}
        is_forward = np.array([*(value == "forward" for value in texts["phase"].values), False])
        rows = np.flatnonzero(is_forward[texts["phase"].codes] & ~table["recomputed"].to_numpy())
        made = cls(str(trace.path))
        if not len(rows):
            raise ValueError(f"{trace.path} has no call in batch {batch}")
        low, high = (table[name].fill_null(np.nan).to_numpy() for name in ("abs_min", "abs_max"))
        dtypes: list[torch.dtype] = []
        ends = np.flatnonzero(np.diff(table["call"].to_numpy()[rows])) + 1
        for number, of_call in enumerate(np.split(rows, ends), 1):
            first = int(of_call[0])
            call = made._add_call(texts["module"].text(first), texts["class"].text(first), number * _TICKS)
            for row in of_call.tolist():
                label, role, shape, name = (
                    texts[part].text(row) for part in ("label", "role", "shape", "dtype")
                )
                size, dtype = sizes(shape or None, "shape"), getattr(torch, name, None)
                if size is None or not table["abs_min"][row].is_valid:
                    continue
                if role == "input":
                    ends_of_range = torch.tensor([[low[row], high[row]]], dtype=torch.float64)
                    call.inputs.append(KeptTensor((2,), ends_of_range, is_range=True))
                elif role == "output" and (cell := table["sketch"][row].as_py()):
                    call.outputs.append(KeptTensor(size, torch.tensor(sketches(cell)), is_sketch=True))
                    dtypes += [dtype] if dtype in FLOATS else []
                elif label == "weight" and dtype in FLOATS:
                    call.weight_shape = size
                    # One number throughout, as in a new norm, tells no weight from another.
                    if low[row] < high[row]:
                        made.weights[call] = _Range(prod(size), dtype, float(low[row]), float(high[row]))
        made._add_root()
        made.calls.sort(key=lambda call: call.start)
        made.dtype = most_common(dtypes, torch.float32)
        return made

    def _add_call(self, path: str, class_name: str, end: int) -> ModuleCall:
        """Add a call. A call is recorded when it ends, so its parts come before it."""
        outermost = [call for call in self.calls if call.parent is None]
        inside: list[ModuleCall] = []
        while outermost and is_in(outermost[-1].path, path) and outermost[-1].path != path:
            inside.append(outermost.pop())
        start = (inside[-1].start if inside else end) - 1
        key = (path, self._occurrences[path])
        self._occurrences[path] += 1
        call = ModuleCall(key, class_name, None, None, start, end, not inside)
        for part in inside:
            part.parent = call
        self.calls.append(call)
        return call

    def _add_root(self) -> None:
        """Add a call around all others, where the whole model was not watched."""
        outermost = [call for call in self.calls if call.parent is None]
        if len(outermost) > 1:
            root = ModuleCall(("", 0), "", None, None, -1, 1 << 62, False, outputs=outermost[-1].outputs)
            for call in outermost:
                call.parent = root
            self.calls.append(root)


class RangeMarks:
    """Marks of weights by their ranges."""

    def __init__(self, *sides: TraceCalls) -> None:
        self._weights = {call: weight for side in sides for call, weight in side.weights.items()}

    def of(self, call: ModuleCall) -> _Range | None:
        """Return the range of the call's weight."""
        return self._weights.get(call)

    def order(self, marks: Sequence[_Range], whole: _Range) -> Sequence[int]:
        """Return the first neighbours, up to four, of which the whole weight has the numbers and the range."""
        spans = (range(i, i + n) for n in (1, 2, 3, 4) for i in range(len(marks) - n + 1))
        return next((span for span in spans if _make_up([marks[i] for i in span], whole)), ())


def _make_up(parts: Sequence[_Range], whole: _Range) -> bool:
    if sum(part.numel for part in parts) != whole.numel:
        return False
    # Rounding keeps the order of numbers, so the ends of a range are rounded as the elements are.
    coarse = max((part.dtype for part in (*parts, whole)), key=FLOATS.index)
    lows, highs = (
        torch.tensor([getattr(part, end) for part in (*parts, whole)]).to(coarse) for end in ("low", "high")
    )
    return bool(lows[:-1].min() == lows[-1] and highs[:-1].max() == highs[-1])


class _TraceComparer(Comparer):
    """Comparison of two traces. Without a measured floor, a difference must be a jump."""

    def first(self) -> Any:
        """Return whether the traces are equal, the first event that differs, the last before, and why none."""
        verdict = super().first()
        event = verdict[1]
        if event is None or self._noise.measured:
            return verdict
        time, seen = event[1].time(event[0], 0), self.events[event]
        earlier = (
            errors.errors.total
            for (kind, pair), errors in self.events.items()
            if errors is not None and pair.time(kind, 0) < time
        )
        largest, where = max(earlier, default=0.0), module_name(event[1].a[0].path)
        if seen is not None and seen.errors.total <= self._factor * largest:
            grown = f"the error grows from {largest:.2g} to {seen.errors.total:.2g} at {where}"
            return None, None, None, f"{grown} without a jump, as rounding does, and the floor is not known"
        return verdict


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
    check_factor(factor)
    for trace in (a, b):
        if not trace.sketched_batches:
            how = "record it with watch(trace=nanwatch.Trace(path, sketches=N))"
            raise ValueError(f"{trace.path} has no sketches; {how}")
    if batches is None:
        both = sorted({*a.sketched_batches} & {*b.sketched_batches})
        if not both:
            raise ValueError(
                f"no batch of {a.path} and {b.path} has sketches in both; name one of each with batches"
            )
        batches = both[0], both[0]
    sides = TraceCalls.of(a, batches[0]), TraceCalls.of(b, batches[1])
    tokens = Tokens(None)
    pairs = match_calls(sides[0].calls, sides[1].calls, tokens, RangeMarks(*sides))
    noise = _noise(sides, None if reference is None else TraceCalls.of(reference, batches[0]))
    comparer = _TraceComparer(sides, pairs, tokens, factor, noise)
    fused = [
        pair for pair in pairs if len(pair.a) != len(pair.b) and comparer.events["outputs", pair] is None
    ]
    if fused:
        why = "the sketches of parts do not make up that of the whole"
        rest = f", and {len(fused) - 1} more," if len(fused) > 1 else ""
        comparer.remarks.append(f"{fused[0].name}{rest} are matched by their weights and not compared: {why}")
    result = comparer.compare()
    if result.first is None or result.where:
        return result
    return replace(
        result, where="in it, or in the code that makes its input, of which a trace has the range alone"
    )


def _noise(sides: tuple[TraceCalls, TraceCalls], reference: TraceCalls | None) -> Noise:
    """Return the noise of A against its run in higher precision, if there is one."""
    noise = Noise(max((side.dtype for side in sides), key=FLOATS.index))
    if reference is not None and sides[0].dtype is noise.coarse:
        low, high = ({call.key: call for call in side.calls} for side in (sides[0], reference))
        noise.measured.append(TwoRuns(0, low, high))
        noise.words = f"rounding error of A, against {reference.path}"
        return noise
    advice = "a third trace, of A in higher precision, would measure it"
    if sides[0].dtype is not noise.coarse:
        advice = f"A is in {dtype_name(sides[0].dtype)}, and what measures it says nothing about B"
    noise.words = f"not measured, assumed to be 4 eps of {dtype_name(noise.coarse)}; {advice}"
    return noise
