"""`nanwatch.compare` of two models or of two traces: the first module that differs by more than rounding does.

A trace, as of an engine, has sketches of outputs. Its ranges of inputs and weights are not compared here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.ranges import fingerprint
from ..numerics.readable import dtype_name
from ..trace.comparison import Comparison
from ..trace.trace_file import Trace, in_order, sketches
from ..util.messages import module_name, spell
from ..util.program import is_in
from .calls import FLOATS, CallPair, ModuleCall, Run, coarsest, match_calls, most_common, own_tensors, run_of
from .comparer import Comparer, Noise, NoiseRuns, Verdict, gaps, module_differences
from .model_runs import Caller, ModelRuns, TensorKey, snapshot

# A buffer is unlike its counterpart where this share of its elements is further apart than rounding makes them.
_UNLIKE = 0.25
_COLUMNS = (
    "batch", "call", "module", "class", "label", "role", "shape", "dtype", "phase", "recomputed", "sketch",
)  # fmt: skip
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
    restore = snapshot([model_a, model_b])
    try:
        tokens = None if tokens is None else tokens.detach().to("cpu", torch.bool)
        callers = (model_a, call_a), (model_b, call_b)
        sides = [ModelRuns(model, call, inputs, restore, most_bytes) for model, call in callers]
        verdict = _Models(sides, tokens, factor).compare()
        return verdict.comparer.result(verdict)
    finally:
        restore()


class _Models:
    """Comparison of two models, with the runs that measure their noise."""

    def __init__(self, sides: list[ModelRuns], tokens: Tensor | None, factor: float) -> None:
        self._sides, self._tokens, self._factor = sides, tokens, factor
        self._conventions, self._remarks = dict[Any, str](), list[str]()

    def compare(self) -> Verdict:
        """Compare the models as they are, and 16-bit models also as copies in float32."""
        noise, precise = self._noise([side.dtype for side in self._sides]), None
        # Copies of a compiled model are not compiled, so they say nothing about it.
        if torch.finfo(noise.coarse).bits <= 16 and not any(side.compiled for side in self._sides):
            stored = coarsest(*(side.stored for side in self._sides))
            copies = [self._run_in(number, torch.float32, stored) for number in (0, 1)]
            if all(copies):
                in_float32 = self._noise([torch.float32] * 2, stored)
                pairs = match_calls(copies, self._tokens)
                shaken = self._shaken(pairs, stored)
                words = in_float32.words + "; rounding of what one model alone holds" * bool(shaken)
                noise = noise._replace(shaken=shaken)
                precise = self._compared(copies, pairs, in_float32._replace(shaken=shaken, words=words))
        runs = [side.run for side in self._sides]
        verdict = self._compared(runs, match_calls(runs, self._tokens), noise)
        comparer = verdict.comparer
        if precise is not None and verdict.equal is not None:
            verdict = _with_copies(verdict, precise, dtype_name(noise.coarse))
        verdict = _with_parameters(comparer, verdict)
        paths = () if verdict.first is None else (verdict.first.module_a, verdict.first.module_b)
        remarks = [
            f"{module_name(path)} of {name} is compiled, and the modules inside a graph make no calls: compile its"
            " parts one by one in place of it, and compare again to name one"
            for name, side, path in zip("AB", self._sides, paths, strict=False)
            if path in side.compiled
        ]
        return verdict._replace(remarks=[*verdict.remarks, *remarks])

    def _compared(self, runs: list[Run], pairs: list[CallPair], noise: Noise) -> Verdict:
        remarks = [*self._remarks]
        return Comparer(runs, pairs, self._tokens, self._factor, noise, self._conventions, remarks).compare()

    def _noise(self, dtypes: list[torch.dtype], stored: torch.dtype | None = None) -> Noise:
        """Run the models, with weights rounded to `stored`, in the coarser of the dtypes and in higher precision."""
        coarse = coarsest(*dtypes)
        low = torch.float32 if coarse is torch.float64 else coarse
        high = torch.float64 if low is torch.float32 else torch.float32
        runs, finest = [], min(dtypes, key=FLOATS.index)
        # The weights of a coarser model are rounded already.
        for number in [number for number in (0, 1) if dtypes[number] is finest]:
            low_run, high_run = (self._run_in(number, dtype, stored) for dtype in (low, high))
            if low_run and high_run:
                runs.append((number, low_run, high_run))
        names = " and ".join("AB"[number] for number, *_ in runs)
        words = f"rounding error of {names}, run in {dtype_name(low)} and again in {dtype_name(high)}"
        words += ", scaled to float64" if coarse is torch.float64 else ""
        if not names:
            words = f"not measured, assumed to be 4 eps of {dtype_name(coarse)}"
        return Noise(coarse, coarsest(coarse, *(side.stored for side in self._sides)), runs, words)

    def _run_in(self, number: int, dtype: torch.dtype, stored: torch.dtype | None) -> Run:
        """Return the run of a side in a precision, empty, and with a remark, where it does not know it."""
        try:
            return self._sides[number].run_in(dtype, stored)
        except Exception as error:  # of the user's code
            self._remarks.append(f"{'AB'[number]} did not run in {dtype_name(dtype)}: {spell(error)}")
            return {}

    def _shaken(self, pairs: list[CallPair], stored: torch.dtype) -> NoiseRuns:
        """Run each model with the tensors shaken that it alone holds in this way, as a cast may have rounded them.

        Such are a buffer that the other side computes, and a weight into which a factor went. A buffer that is further
        from its counterpart than rounding makes it is a difference of its own.
        """
        alike = set[TensorKey]()
        for pair in pairs:
            buffers = () if pair.a.module is None else pair.a.module._buffers
            apart = gaps(pair).items()
            rounded = {name for name, (_, beyond) in apart if name not in buffers or beyond <= _UNLIKE}
            names = pair.a.tensors().keys() & pair.b.tensors().keys() - rounded
            alike |= {(part.path, name) for call in pair for part in call.parts or (call,) for name in names}
        prints: list[dict[TensorKey, int]] = [{}, {}]
        for side, bits in zip(self._sides, prints, strict=True):
            for path, module in side.modules.items():
                bits |= {(path, name): fingerprint(x.to(stored)) for name, x in own_tensors(module).items()}
        runs = []
        for number, side in enumerate(self._sides):
            there = {*prints[1 - number].values()}
            keys = [key for key, bits in prints[number].items() if key not in alike and bits not in there]
            if keys:
                plain, shaken = (side.run_in(torch.float32, stored, names) for names in ((), keys))
                runs.append((number, plain, shaken))
        return runs


def _with_copies(result: Verdict, precise: Verdict, name: str) -> Verdict:
    """Return what the comparison of two models in the dtype `name` and that of their float32 copies say together."""
    if result.equal is False and precise.equal:
        only = f"the float32 copies are equal: look at dtypes, and at the order of what {name} rounds"
        return result._replace(remarks=[only])
    if precise.equal is not False or (result.equal is False and precise.first is None):
        return result
    if result.equal:
        return precise._replace(hidden_by=name)
    if result.first is None or precise.first is None or result.first.name != precise.first.name:
        first = f": {result.why}" if result.first is None else f" first in {result.first.name}"
        remark = f"this is of float32 copies; in {name} they differ{first}"
        return precise._replace(remarks=[remark])
    return result._replace(where=precise.where, likely=precise.likely)


def _with_parameters(comparer: Comparer, result: Verdict) -> Verdict:
    """Return the result with what modules keep apart: one with another own tensor or eps is never equal."""
    pairs = {(pair.a.path, pair.b.path): pair for pair in reversed(comparer.pairs)}.values()
    apart = [(pair, module_differences(pair)) for pair in pairs]
    faults = [(pair, words) for pair, counts in apart if (words := [*filter(counts.get, counts)])]
    # A second fault, or code, makes up for the first where all that follows agrees.
    leaves = [pair for pair in comparer.pairs if pair.is_leaf]
    is_lost = len(faults) == 1 and any(comparer.differs(("inputs", pair)) for pair in leaves)
    # The runs that measured the noise may be as far off as the outputs. Then any such module is named.
    if result.equal and not is_lost:
        differ = {pair for kind in ("inputs", "outputs") for pair in pairs if comparer.differs((kind, pair))}
        faults = [(pair, words) for pair, words in faults if pair not in differ]
    if not faults or result.first is not None or result.equal is None:
        return result
    pair, words = faults[-1]
    unseen = "in its own parameters or eps; with these inputs the output shows no more than rounding"
    first, where = comparer.place(pair), result.why or unseen
    return result._replace(equal=False, why="", first=first, where=where, likely=words)


def compare_traces(
    a: Trace,
    b: Trace,
    reference: Trace | None = None,
    *,
    batches: tuple[int, int] | None = None,
    factor: float = 8.0,
) -> Comparison:
    """Name the first module whose outputs differ between two traces that have sketches.

    `batches` are those of A and of B; by default the first with sketches in both. `reference` is a trace of A in
    higher precision, from which the noise floor is measured; its batch is that of A. Without one a difference must also
    be a jump. Raises ValueError where no batch has sketches in both, or one of `batches` has none.
    """
    _check_factor(factor)
    how = "record it with watch(trace=nanwatch.Trace(path, sketches=N)), or name one of each with batches"
    if batches is None:
        both = {*a.sketched_batches} & {*b.sketched_batches}
        if not both:
            raise ValueError(f"no batch of {a.path} and {b.path} has sketches in both; {how}")
        batches = min(both), min(both)
    for trace, batch in zip((a, b), batches, strict=True):
        if batch not in trace.sketched_batches:
            raise ValueError(f"{trace.path} has no sketches of batch {batch}; {how}")
    (run_a, dtype_a), (run_b, dtype_b) = _run_of(a, batches[0]), _run_of(b, batches[1])
    coarse = coarsest(dtype_a, dtype_b)
    runs, words = [], f"not measured, assumed to be 4 eps of {dtype_name(coarse)}; "
    if reference is None:
        words += "a third trace, of A in higher precision, would measure it"
    elif dtype_a is not coarse:
        words += f"A is in {dtype_name(dtype_a)}, and what measures it says nothing about B"
    else:
        runs.append((0, run_a, _run_of(reference, batches[0])[0]))
        words = f"rounding error of A, against {reference.path}"
    pairs, noise = match_calls((run_a, run_b), None), Noise(coarse, coarse, runs, words)
    verdict = Comparer((run_a, run_b), pairs, None, factor, noise, {}, []).compare()
    if verdict.first is not None and not verdict.where:
        where = "in it, or in the code that makes its input, of which a trace has the range alone"
        verdict = verdict._replace(where=where)
    result = verdict.comparer.result(verdict)
    return replace(result, headline=f"{result.headline} (batch {batches[0]})")


def _run_of(trace: Trace, batch: int) -> tuple[Run, torch.dtype]:
    """Return the calls of one batch in the order of their starts, and the dtype of most outputs.

    A call is recorded when it ends, so its parts come before it.
    """
    rows = in_order(trace.table(_COLUMNS, [batch])).to_pylist()
    rows = [row for row in rows if row["phase"] == "forward" and not row["recomputed"]]
    if not rows:
        raise ValueError(f"{trace.path} has no call in batch {batch}")
    calls, dtypes = list[ModuleCall](), list[torch.dtype]()
    for number, (_, group) in enumerate(groupby(rows, key=lambda row: row["call"]), 1):
        first, *others = group
        path, end = first["module"], number * _TICKS
        call = ModuleCall(path, first["class"], None, end - 1, end)
        for row in (first, *others):
            shape = tuple(json.loads(row["shape"] or "[]"))
            if row["role"] == "output" and row["sketch"]:
                rows = torch.tensor(sketches(row["sketch"]))
                is_whole = len(rows) == prod(shape[:-1])  # and not the first rows alone
                call.outputs.append(rows.reshape(*shape[:-1], -1) if is_whole else rows)
                dtypes.append(getattr(torch, row["dtype"] or "", torch.bool))
            elif row["role"] == "weight":
                call.shapes += (shape,)
        calls.append(call)
    for number, call in enumerate(calls):
        later = (x for x in calls[number + 1 :] if x.path != call.path and is_in(call.path, x.path))
        if (parent := next(later, None)) is not None:
            parent.start = min(parent.start, call.start - 1)
    run = run_of(calls)
    if not all(calls[-1].holds(call) for call in calls[:-1]):  # the whole model was not watched
        root = ModuleCall("", "", None, -1, 1 << 62, -1, is_leaf=False, outputs=calls[-1].outputs)
        run = {root.key: root, **run}
    return run, most_common(dtypes, torch.float32)


def _check_factor(factor: float) -> None:
    if not factor > 1:
        raise ValueError(f"factor should be above 1, the noise floor itself, got {factor}")
