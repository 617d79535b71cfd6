"""`nanwatch.compare` of two models or of two traces: the first module that differs by more than rounding does.

A trace, as of an engine, has sketches of outputs. Of inputs and weights it has ranges, which are not compared here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.ranges import fingerprint
from ..numerics.readable import dtype_name
from ..records.fields import sizes
from ..trace.result import Comparison
from ..trace.trace_file import Trace, in_order, sketches
from ..util.modules import is_in
from ..util.visible import module_name, spell, without_wrappers
from .calls import FLOATS, CallPair, ModuleCall, Run, Tokens, coarsest, match_calls, most_common
from .comparer import Comparer, Noise, NoiseRuns, Verdict, gap_between, gaps, parameter_differences
from .model_runs import Caller, ModelRuns, Snapshot

# A buffer is unlike another one where this share of its elements is further apart than rounding makes them.
_UNLIKE = 0.25
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


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    inputs: Any,
    *,
    call_a: Caller | None = None,
    call_b: Caller | None = None,
    tokens: Tensor | None = None,
    factor: float = 8.0,
    most_bytes: int = 1 << 34,
) -> Comparison:
    """Run two implementations of one model on the same inputs, and name the first module that differs.

    Args:
        model_a: the reference.
        model_b: the same weights in another implementation, precision, device or mode, or compiled.
        inputs: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        call_a: how to call A, as `lambda model, inputs: model(inputs["input_ids"])`, where `model(inputs)` will not do.
        call_b: the same for B.
        tokens: mask (batch, length) of the tokens that count. Default: a two-dimensional `inputs["attention_mask"]`.
        factor: how many times the noise floor a difference must have.
        most_bytes: memory on the host for copies of the tensors of a run. ValueError where they need more.

    Modules are matched by name, by weights, as parts of a fused projection, else by order, class, shape and values. The
    noise floor of each module is its error against a run of the same weights and buffers in higher precision, for which
    the models are copied. Models of two precisions are held to the coarser one. The copies of 16-bit models are
    compared too, in float32: a difference that rounding hides has `equal_in`. A leaf with another parameter is never
    equal. A model under torch.compile runs as it was compiled; the modules inside one compiled graph make no calls, so
    none of them is named.

    Neither model is changed, and random states are as before. Gradients are off. Raises what the models raise. The
    result has `to_text()`, `to_json()` and `to_html()`.

    >>> import copy, torch
    >>> from nanwatch import compare
    >>> a = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4, eps=1e-5))
    >>> b = copy.deepcopy(a)
    >>> b[1].eps = 1e-2
    >>> result = compare(a, b, torch.randn(3, 4))
    >>> result.first.module_a, result.words("Looks like")[0]
    ('1', 'eps is 1e-05 in A and 0.01 in B')
    """
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} should be a torch.nn.Module, got {type(model).__name__}")
    _check_factor(factor)
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # transformers' BatchEncoding among them
        mask = inputs.get("attention_mask")
        tokens = mask if tokens is None and isinstance(mask, Tensor) and mask.ndim == 2 else tokens
    snapshot = Snapshot([model_a, model_b])
    with snapshot.kept():
        models = [
            ModelRuns(model, call, inputs, snapshot, most_bytes)
            for model, call in ((model_a, call_a), (model_b, call_b))
        ]
        verdict = _compared(models, Tokens(tokens), factor)
        return verdict.comparer.result(verdict)


def _compared(models: list[ModelRuns], tokens: Tokens, factor: float) -> Verdict:
    """Compare two models as they are, and 16-bit models also as copies in float32."""
    remarks: list[str] = []
    conventions: dict[Any, str] = {}
    noise = _measured(models, [model.dtype for model in models], None, remarks)
    precise = None
    # Copies of a compiled model are not compiled, so they say nothing about it.
    if torch.finfo(noise.coarse).bits <= 16 and not any(model.compiled for model in models):
        stored = coarsest(*(model.stored for model in models))
        copies = [
            [*run.values()] for run in _runs_in(models, (0, 1), torch.float32, stored, remarks).values()
        ]
        if len(copies) == 2:
            in_float32 = _measured(models, [torch.float32] * 2, stored, remarks)
            pairs = match_calls(copies[0], copies[1], tokens)
            shaken = _shaken(pairs, models, stored, remarks)
            words = in_float32.words + "; rounding of what one model alone holds" * bool(shaken)
            in_float32 = in_float32._replace(shaken=shaken, words=words)
            noise = noise._replace(shaken=shaken)
            precise = Comparer(copies, pairs, tokens, factor, in_float32, conventions, [*remarks]).compare()
    calls = [model.calls for model in models]
    pairs = match_calls(calls[0], calls[1], tokens)
    verdict = Comparer(calls, pairs, tokens, factor, noise, conventions, [*remarks]).compare()
    comparer = verdict.comparer
    if precise is not None and verdict.equal is not None:
        verdict = _with_copies(verdict, precise, dtype_name(noise.coarse))
    verdict = _with_parameters(comparer, verdict)
    names = () if verdict.first is None else (verdict.first.module_a, verdict.first.module_b)
    for side, model, path in zip("AB", models, names, strict=False):
        if path in model.compiled:
            graph = f"{module_name(path)} of {side} is compiled, and the modules inside a graph make no calls"
            how = "compile its parts one by one in place of it, and compare again to name one"
            verdict = verdict._replace(remarks=(*verdict.remarks, f"{graph}: {how}"))
    return verdict


def _measured(
    models: list[ModelRuns], dtypes: list[torch.dtype], stored: torch.dtype | None, remarks: list[str]
) -> Noise:
    """Run the models, with weights rounded to `stored`, in the coarser of the dtypes and in higher precision."""
    coarse = coarsest(*dtypes)
    low = torch.float32 if coarse is torch.float64 else coarse
    high = torch.float64 if low is torch.float32 else torch.float32
    # Of two precisions: the weights of the coarser side are rounded already.
    finer = [side for side in (0, 1) if FLOATS.index(dtypes[side]) <= FLOATS.index(dtypes[1 - side])]
    low_runs, high_runs = (_runs_in(models, finer, dtype, stored, remarks) for dtype in (low, high))
    runs = [
        (side, low_runs[side], high_runs[side]) for side in finer if side in low_runs and side in high_runs
    ]
    names = " and ".join("AB"[side] for side, *_ in runs)
    words = f"rounding error of {names}, run in {dtype_name(low)} and again in {dtype_name(high)}"
    words += ", scaled to float64" if coarse is torch.float64 else ""
    if not names:
        words = f"not measured, assumed to be 4 eps of {dtype_name(coarse)}"
    return Noise(coarse, coarsest(coarse, *(model.stored for model in models)), runs, words)


def _runs_in(
    models: list[ModelRuns],
    sides: Sequence[int],
    dtype: torch.dtype,
    stored: torch.dtype | None,
    remarks: list[str],
) -> dict[int, Run]:
    """Return the runs of those sides that know this precision, with weights rounded to `stored`."""
    runs = {}
    for side in sides:
        try:
            runs[side] = models[side].run_in(dtype, stored)
        except Exception as error:  # of the user's code, which may know one precision only
            remarks.append(f"{'AB'[side]} did not run in {dtype_name(dtype)}: {spell(error)}")
    return runs


def _shaken(
    pairs: list[CallPair], models: list[ModelRuns], stored: torch.dtype, remarks: list[str]
) -> NoiseRuns:
    """Run each model that alone holds a tensor in this way with that tensor shaken, as a cast may have rounded it.

    Such are a buffer of frequencies that the other side computes, and a weight into which a factor went. A buffer that
    is further from all of its name on the other side than rounding makes it is a difference of its own.
    """
    shared = set[tuple[str, str]]()
    for pair in pairs:
        alike = pair.a.tensors().keys() & pair.b.tensors().keys() - gaps(pair).keys()
        shared |= {(part.path, name) for call in pair for part in call.parts or (call,) for name in alike}
    tensors = [model.tensors() for model in models]
    prints = [{key: fingerprint(x.to(stored)) for key, x in held.items()} for held in tensors]
    runs = []
    for side, model in enumerate(models):
        keys, prints_there = [], {*prints[1 - side].values()}
        for key, x in tensors[side].items():
            if key in shared or prints[side][key] in prints_there:
                continue
            path, name = key
            is_buffer = name in model.modules[path]._buffers
            there = [y for (_, same), y in tensors[1 - side].items() if same == name and y.shape == x.shape]
            gaps_to = [gap_between(name, x, y, is_buffer=True) for y in there if is_buffer]
            if gaps_to and all(gap is not None and gap.beyond > _UNLIKE for gap in gaps_to):
                where = f"{name} of {module_name(path)} of {'AB'[side]}"
                remarks.append(f"{where} is further from each {name} of {'BA'[side]} than rounding makes it")
            else:
                keys.append(key)
        if keys:
            runs.append(
                (side, model.run_in(torch.float32, stored), model.run_in(torch.float32, stored, keys))
            )
    return runs


def _with_copies(result: Verdict, precise: Verdict, name: str) -> Verdict:
    """Return what the comparison of two models in the dtype `name` and that of their float32 copies say together."""
    if result.equal is False and precise.equal:
        only = f"the float32 copies are equal: look at dtypes, and at the order of what {name} rounds"
        return result._replace(remarks=(*result.remarks, only))
    if precise.equal is not False or (result.equal is False and precise.first is None):
        return result
    if result.equal:
        return precise._replace(hidden_by=name)
    if result.first is None or precise.first is None or result.first.name != precise.first.name:
        first = f": {result.why}" if result.first is None else f" first in {result.first.name}"
        remark = f"this is of float32 copies; in {name} they differ{first}"
        return precise._replace(remarks=(remark, *precise.remarks))
    return result._replace(where=precise.where, likely=precise.likely)


def _with_parameters(comparer: Comparer, result: Verdict) -> Verdict:
    """Return the result with what modules keep apart: one with another own tensor or eps is never equal."""
    pairs = {(pair.a.path, pair.b.path): pair for pair in reversed(comparer.pairs)}.values()
    unlike = [(pair, words) for pair in pairs if (words := parameter_differences(pair))]
    # What makes up for another weight is another weight, or code: then all that follows agrees.
    is_lost = len(unlike) == 1 and comparer.spreads()
    faults = [(pair, words) for pair, words in unlike[::-1] if is_lost or comparer.agrees(pair)]
    if result.equal and faults:
        pair, words = faults[0]
        where = (
            "in its own parameters or eps; with these inputs the model's output shows no more than rounding"
        )
        result = result._replace(equal=False, first=comparer.place(pair), where=where, likely=words)
    if result.equal is False and result.first is None:
        same_names = [pair for pair in pairs if len({without_wrappers(call.path) for call in pair}) == 1]
        for pair in same_names[::-1]:
            for gap in gaps(pair).values():
                first = comparer.place(pair)
                return result._replace(first=first, where=result.why, why="", likely=(gap.words,))
    return result


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
    _check_factor(factor)
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
    verdict = Comparer((calls_a, calls_b), pairs, tokens, factor, noise, {}, []).compare()
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


def _check_factor(factor: float) -> None:
    if not factor > 1:
        raise ValueError(f"factor should be above 1, the noise floor itself, got {factor}")
