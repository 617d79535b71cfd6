"""Comparison of two traces with sketches, as of two engines: the first module whose outputs differ.

A trace has sketches of outputs. Of inputs and weights it has ranges, which are not compared here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from math import prod

import torch

from ..numerics.readable import dtype_name
from ..records.fields import sizes
from ..trace.result import Comparison
from ..trace.trace_file import Trace, in_order, sketches
from ..util.modules import is_in
from .calls import ModuleCall, Tokens, coarsest, most_common
from .comparer import Comparer, Noise
from .matching import match_calls
from .models import check_factor

_COLUMNS = (
    "batch",
    "call",
    "module",
    "class",
    "label",
    "role",
    "shape",
    "dtype",
    "phase",
    "recomputed",
    "sketch",
)
# Time between the ends of two calls, in which there is room for the starts of as many containers around one call.
_TICKS = 1 << 20


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
        both = {*a.sketched_batches} & {*b.sketched_batches}
        if not both:
            raise ValueError(
                f"no batch of {a.path} and {b.path} has sketches in both; name one of each with batches"
            )
        batches = min(both), min(both)
    (calls_a, dtype_a), (calls_b, dtype_b) = _calls_of(a, batches[0]), _calls_of(b, batches[1])
    coarse = coarsest(dtype_a, dtype_b)
    words = f"not measured, assumed to be 4 eps of {dtype_name(coarse)}"
    runs = []
    if reference is None:
        words += "; a third trace, of A in higher precision, would measure it"
    elif dtype_a is not coarse:
        words += f"; A is in {dtype_name(dtype_a)}, and what measures it says nothing about B"
    else:
        high, _ = _calls_of(reference, batches[0])
        runs.append((0, {call.key: call for call in calls_a}, {call.key: call for call in high}))
        words = f"rounding error of A, against {reference.path}"
    tokens = Tokens(None)
    pairs = match_calls(calls_a, calls_b, tokens)
    noise = Noise(coarse, coarse, runs, words)
    verdict = Comparer((calls_a, calls_b), pairs, tokens, factor, noise, {}).compare()
    if verdict.first is not None and not verdict.where:
        where = "in it, or in the code that makes its input, of which a trace has the range alone"
        verdict = verdict._replace(where=where)
    result = verdict.comparer.result(verdict)
    return replace(result, headline=f"{result.headline} (batch {batches[0]})")


def _calls_of(trace: Trace, batch: int) -> tuple[list[ModuleCall], torch.dtype]:
    """Return the calls of one batch in the order of their starts, and the dtype of most outputs.

    A call is recorded when it ends, so its parts come before it.
    """
    rows = in_order(trace.table(_COLUMNS, [batch])).to_pylist()
    rows = [row for row in rows if row["phase"] == "forward" and not row["recomputed"]]
    if not rows:
        raise ValueError(f"{trace.path} has no call in batch {batch}")
    calls: list[ModuleCall] = []
    outermost: list[ModuleCall] = []
    occurrences: Counter[str] = Counter()
    dtypes = []
    for number, (_, group) in enumerate(groupby(rows, key=lambda row: row["call"]), 1):
        records = list(group)
        path, end = records[0]["module"], number * _TICKS
        inside: list[ModuleCall] = []
        while outermost and is_in(outermost[-1].path, path) and outermost[-1].path != path:
            inside.append(outermost.pop())
        start = (inside[-1].start if inside else end) - 1
        call = ModuleCall((path, occurrences[path]), records[0]["class"], None, None, start, end, not inside)
        occurrences[path] += 1
        for part in inside:
            part.parent = call
        for row in records:
            shape = sizes(row["shape"], "shape") or ()
            if row["role"] == "output" and row["sketch"]:
                rows = torch.tensor(sketches(row["sketch"]))
                is_whole = len(rows) == prod(shape[:-1])  # and not the first rows alone
                call.outputs.append(rows.reshape(*shape[:-1], -1) if is_whole else rows)
                dtypes.append(getattr(torch, row["dtype"] or "", torch.bool))
            elif row["role"] == "weight":
                call.shapes += (shape,)
        calls.append(call)
        outermost.append(call)
    if len(outermost) > 1:  # the whole model was not watched
        root = ModuleCall(("", 0), "", None, None, -1, 1 << 62, False, outputs=outermost[-1].outputs)
        for call in outermost:
            call.parent = root
        calls.append(root)
    return sorted(calls, key=lambda call: call.start), most_common(dtypes, torch.float32)
