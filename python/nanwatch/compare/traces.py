"""Comparison of two traces with sketches, as of two engines: the first module whose outputs differ.

A trace has sketches of outputs, and ranges of inputs. Weights, by whose ranges modules of other names
are matched, have ranges too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from ..numerics.readable import dtype_name
from ..records.fields import sizes
from ..trace.trace_file import Trace, in_order, sketches, strings
from ..util.modules import is_in
from .calls import ModuleCall
from .comparer import Comparer, Noise, TwoRuns
from .comparison import Comparison
from .matching import match_calls
from .model_runs import most_common
from .models import check_factor
from .tensors import FLOATS, KeptTensor, Tokens, coarsest

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
    """Calls of one batch of a trace: sketches of their outputs, ranges of their inputs and weights."""

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
        is_forward = np.array([*(phase == "forward" for phase in texts["phase"].values), False])
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
                role, name = texts["role"].text(row), texts["dtype"].text(row)
                size, dtype = sizes(texts["shape"].text(row) or None, "shape"), getattr(torch, name, None)
                if size is None or not table["abs_min"][row].is_valid:
                    continue
                if role == "input":
                    span = torch.tensor([[low[row], high[row]]], dtype=torch.float64)
                    call.inputs.append(KeptTensor((2,), span, is_range=True))
                elif role == "output" and (cell := table["sketch"][row].as_py()):
                    call.outputs.append(KeptTensor(size, torch.tensor(sketches(cell)), is_sketch=True))
                    dtypes += [dtype] if dtype in FLOATS else []
                elif texts["label"].text(row) == "weight" and dtype in FLOATS:
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
    coarse = coarsest(*(part.dtype for part in (*parts, whole)))
    lows, highs = (
        torch.tensor([getattr(part, end) for part in (*parts, whole)]).to(coarse) for end in ("low", "high")
    )
    return bool(lows[:-1].min() == lows[-1] and highs[:-1].max() == highs[-1])


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
            words = "has sketches in both; name one of each with batches"
            raise ValueError(f"no batch of {a.path} and {b.path} {words}")
        batches = both[0], both[0]
    sides = TraceCalls.of(a, batches[0]), TraceCalls.of(b, batches[1])
    tokens = Tokens(None)
    pairs = match_calls(sides[0].calls, sides[1].calls, tokens, RangeMarks(*sides))
    noise = _noise(sides, None if reference is None else TraceCalls.of(reference, batches[0]))
    result = Comparer(sides, pairs, tokens, factor, noise).compare()
    if result.first is None or result.where:
        return result
    where = "in it, or in the code that makes its input, of which a trace has the range alone"
    return replace(result, where=where)


def _noise(sides: tuple[TraceCalls, TraceCalls], reference: TraceCalls | None) -> Noise:
    """Return the noise of A against its run in higher precision, if there is one."""
    noise = Noise(coarsest(sides[0].dtype, sides[1].dtype))
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
