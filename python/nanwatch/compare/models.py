"""`nanwatch.compare`: the first module in which two implementations of one model differ by more than rounding does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.ranges import fingerprint
from ..numerics.readable import dtype_name
from ..util.modules import is_in
from ..util.visible import first_few, module_name, spell, without_wrappers
from .calls import CallPair
from .comparer import Comparer, Noise, TwoRuns
from .comparison import Comparison
from .matching import match_calls
from .model_runs import Caller, ModelRuns, TensorKey
from .snapshot import Snapshot
from .tensors import FLOATS, Tokens, coarsest
from .words import are_of_a_kind, gaps, own_tensors, parameter_differences

_Models = tuple[ModelRuns, ModelRuns]


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
        model_b: the same weights in another implementation, precision, device or mode, or compiled.
        inputs: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        call_a: how to call A, as `lambda model, inputs: model(inputs["input_ids"])`, where `model(inputs)` will not do.
        call_b: the same for B.
        tokens: mask (batch, length) of the tokens that count. Default: a two-dimensional `inputs["attention_mask"]`.
        factor: how many times the noise floor a difference must have.
        most_bytes: memory for copies of tensors, per run. Beyond it rows are kept as sketches of 32 numbers.

    Modules are matched by name, by weights, as parts of a fused projection, else by order, class, shape and values. The
    noise floor of each module is its error against a run of the same weights and buffers in higher precision, for which
    the models are copied. Models of two precisions are held to the coarser one. The copies of 16-bit models are
    compared too, in float32: a difference that rounding hides has `equal_in`. A leaf with another parameter is never
    equal. A model under torch.compile runs as it was compiled. If it differs, its parts are compiled in the same way,
    one level after the other, to name the module.

    Neither model is changed, and random states are as before. Gradients are off. Raises what the models raise. The
    result has `to_text()`, `to_json()` and `to_html()`.

    >>> import copy, torch
    >>> from nanwatch import compare
    >>> a = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4, eps=1e-5))
    >>> b = copy.deepcopy(a)
    >>> b[1].eps = 1e-2
    >>> result = compare(a, b, torch.randn(3, 4))
    >>> result.first.module_a, result.likely[0]
    ('1', 'eps is 1e-05 in A and 0.01 in B')
    """
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} should be a torch.nn.Module, got {type(model).__name__}")
    check_factor(factor)
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # transformers' BatchEncoding among them
        mask = inputs.get("attention_mask")
        tokens = mask if tokens is None and isinstance(mask, Tensor) and mask.ndim == 2 else tokens
    snapshot = Snapshot([model_a, model_b])
    with snapshot.kept():
        a, b = (
            ModelRuns(model, call, inputs, snapshot, most_bytes)
            for model, call in ((model_a, call_a), (model_b, call_b))
        )
        result = _compare_models((a, b), Tokens(tokens), factor)
        for side in (1, 0):
            result = _opened((a, b), side, result, Tokens(tokens), factor)
        return result


def check_factor(factor: float) -> None:
    """Raise ValueError unless a difference has to be above the noise."""
    if not factor > 1:
        raise ValueError(f"factor should be above 1, the noise floor itself, got {factor}")


def _compare_models(models: _Models, tokens: Tokens, factor: float) -> Comparison:
    """Compare two models as they are, and 16-bit models also as copies in float32."""
    coarse = coarsest(*(model.dtype for model in models))
    remarks, copies = [], []
    # Copies of a compiled model are not compiled, so they say nothing about it.
    if torch.finfo(coarse).bits <= 16 and not any(model.is_compiled for model in models):
        stored = coarsest(*(model.stored for model in models))
        for name, model in zip("AB", models, strict=True):
            try:
                copies.append(model.copied(torch.float32, stored))
            except Exception as error:  # of the user's code, which may know one precision only
                remarks.append(f"{name} did not run in float32: {spell(error)}")
    rounded, conventions = list[TwoRuns](), dict[Any, str]()
    precise = None
    if len(copies) == 2:
        in_float32 = _comparer((copies[0], copies[1]), tokens, factor, remarks, rounded, conventions)
        precise = in_float32.compare()
    comparer = _comparer(models, tokens, factor, remarks, rounded, conventions)
    comparer.remarks[:0] = remarks
    result = comparer.compare()
    if precise is not None and result.equal is not None:
        result = _with_copies(result, precise, dtype_name(coarse))
    return _with_state(comparer, result)


def _comparer(
    models: _Models,
    tokens: Tokens,
    factor: float,
    remarks: list[str],
    rounded: list[TwoRuns],
    conventions: dict[Any, str],
) -> Comparer:
    """Return the comparer of two models. Their float32 copies, which come first, fill `rounded` and `conventions`."""
    noise = _measured(models, remarks)
    noise.rounded = rounded
    pairs = match_calls(models[0].calls, models[1].calls, tokens)
    are_copies = any(model.dtype is torch.float32 and model.stored in FLOATS[2:] for model in models)
    for side, keys in enumerate(_rounded_state(pairs, models) if are_copies else ()):
        if keys:
            model = models[side]
            rounded.append(TwoRuns(side, model.run_in(model.dtype), model.shaken(keys)))
            name = first_few([".".join(filter(None, key)) for key in keys], 1)
            noise.words += f"; rounding of {name}, which {'AB'[1 - side]} has not so"
    narrowest = coarsest(noise.coarse, *(model.stored for model in models))
    return Comparer(models, pairs, tokens, factor, noise, narrowest=narrowest, conventions=conventions)


def _measured(models: _Models, remarks: list[str]) -> Noise:
    """Run the models in low and in high precision."""
    coarse = coarsest(*(model.dtype for model in models))
    low = torch.float32 if coarse is torch.float64 else coarse
    high = torch.float64 if low is torch.float32 else torch.float32
    noise = Noise(coarse)
    for side, (model, counterpart) in enumerate((models, models[::-1])):
        if FLOATS.index(model.dtype) > FLOATS.index(counterpart.dtype):
            continue  # its weights are rounded already
        try:
            noise.measured.append(TwoRuns(side, model.run_in(low), model.run_in(high)))
        except Exception as error:  # of the user's code, which may know one precision only
            remarks.append(f"{'AB'[side]} did not run in {dtype_name(high)}: {spell(error)}")
    names = " and ".join("AB"[runs.side] for runs in noise.measured)
    scaled = ", scaled to float64" if coarse is torch.float64 else ""
    noise.words = (
        f"rounding error of {names}, run in {dtype_name(low)} and again in {dtype_name(high)}{scaled}"
    )
    if not names:
        noise.words = f"not measured, assumed to be 4 eps of {dtype_name(coarse)}"
    return noise


def _rounded_state(pairs: list[CallPair], models: _Models) -> tuple[list[TensorKey], list[TensorKey]]:
    """Return the tensors of each side that the other has not bit for bit: they may have been rounded on their way.

    Such are a buffer of frequencies that the other side computes, and a weight into which a factor went. A buffer that
    modules of one kind have further apart than rounding makes it is a difference of its own.
    """
    tensors = models[0].tensors(), models[1].tensors()
    stored = coarsest(*(model.stored for model in models))
    prints = [{key: fingerprint(x.to(stored)) for key, x in side.items()} for side in tensors]
    known: set[TensorKey] = set()
    for pair in pairs:
        apart, is_one_kind = gaps(*pair.modules), are_of_a_kind(*pair.modules)
        names = set.intersection(*(set(own_tensors(module)) for side in pair.modules for module in side))
        for name in names:
            gap = apart.get(name)
            if gap is None or (is_one_kind and gap.is_buffer and not gap.is_rounding):
                known |= {(call.path, name) for side in pair.sides for call in side}
    a, b = (
        [
            key
            for key, number in prints[i].items()
            if number not in prints[1 - i].values() and key not in known
        ]
        for i in (0, 1)
    )
    return a, b


def _with_copies(result: Comparison, precise: Comparison, name: str) -> Comparison:
    """Return what the comparison of two models in the dtype `name` and that of their float32 copies say together."""
    if result.equal is False and precise.equal:
        only = f"the float32 copies are equal: look at dtypes, and at the order of what {name} rounds"
        return replace(result, remarks=(*result.remarks, only))
    if precise.equal is not False or (result.equal is False and precise.first is None):
        return result
    if result.equal:
        return replace(precise, equal_in=name)
    if result.first is None or precise.first is None or result.first.name != precise.first.name:
        first = f": {result.why}" if result.first is None else f" first in {result.first.name}"
        remark = f"this is of float32 copies; in {name} they differ{first}"
        return replace(precise, remarks=(remark, *precise.remarks))
    return replace(result, where=precise.where, likely=precise.likely)


def _with_state(comparer: Comparer, result: Comparison) -> Comparison:
    """Return the result with what modules keep apart: a leaf with another parameter or eps is never equal."""
    pairs = {pair.names: pair for pair in reversed(comparer.pairs)}
    leaves = {names: parameter_differences(*pair.modules) for names, pair in pairs.items() if pair.is_leaf}
    apart = [names for names, words in leaves.items() if words]
    # What makes up for another weight is another module too.
    faults = [
        pair for pair in comparer.pairs if pair.names in apart and (comparer.agrees(pair) or len(apart) == 1)
    ]
    if result.equal and faults:
        where = (
            "in its own parameters or eps; with these inputs the model's output shows no more than rounding"
        )
        first, likely = comparer.module_error(faults[0]), tuple(leaves[faults[0].names])
        result = replace(result, equal=False, first=first, where=where, likely=likely)
    stored = [
        (pair, gap.words)
        for names, pair in reversed(pairs.items())
        if len({*map(without_wrappers, names)}) == 1
        for gap in gaps(*pair.modules).values()
    ]
    if not stored:
        return result
    words = first_few([f"{module_name(pair.names[0])} ({text})" for pair, text in stored])
    result = replace(result, remarks=(*result.remarks, f"apart before anything is run: {words}"))
    if result.equal is False and result.first is None:
        pair, text = stored[0]
        first = comparer.module_error(pair)
        return replace(result, first=first, where=result.why, why="", likely=(text,))
    return result


def _opened(models: _Models, side: int, result: Comparison, tokens: Tokens, factor: float) -> Comparison:
    """Name the module inside a compiled one that differs, by compiling its parts one by one in the same way."""
    name, model = "AB"[side], models[side]
    outer = None if result.first is None else (result.first.module_a, result.first.module_b)[side]
    if result.equal is not False or outer is None or not model.is_compiled_at(outer):
        return result
    try:
        compile_part = model.compiler_of(outer)
    except ValueError as error:
        return replace(result, remarks=(*result.remarks, f"{module_name(outer)} of {name}: {error}"))
    while (opened := model.with_compiled_parts(outer, compile_part)) is not None:
        inner = _compare_models((models[0], opened) if side else (opened, models[1]), tokens, factor)
        if inner.equal is not False or inner.first is None:
            gone = f"with its parts compiled one by one, {module_name(outer)} of {name} shows no difference"
            words = f"{gone}: it comes from its own code, or from compiling the parts together"
            return replace(result, remarks=(*result.remarks, words))
        words = f"the parts of {module_name(outer)} of {name} were compiled one by one, as it was, to name the module"
        result = replace(inner, remarks=(*inner.remarks, words))
        blamed = (inner.first.module_a, inner.first.module_b)[side]
        if blamed == outer or not is_in(blamed, outer):
            break
        outer = blamed
    return result
