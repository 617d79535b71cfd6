"""`nanwatch.compare`: the first module in which two implementations of one model differ by more than rounding does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..numerics.ranges import fingerprint
from ..numerics.readable import dtype_name
from ..util.modules import each_module, each_parameter, is_in
from ..util.visible import module_name, spell, without_wrappers
from .calls import (
    COMPILED,
    FLOATS,
    CallPair,
    ModuleCall,
    Run,
    Tokens,
    coarsest,
    compiled_in_place,
    is_compiled,
    most_common,
    own_tensors,
    plain_path,
    recorded,
)
from .comparer import Comparer, Noise
from .comparison import Comparison
from .matching import match_calls
from .snapshot import Snapshot
from .words import are_of_a_kind, gaps, parameter_differences

_Caller = Callable[[nn.Module, Any], Any]
# Path of a module, and name of its parameter or buffer.
TensorKey = tuple[str, str]
_MOST_PARTS = 1 << 12


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    inputs: Any,
    *,
    call_a: _Caller | None = None,
    call_b: _Caller | None = None,
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
        a = ModelRuns(model_a, call_a, inputs, snapshot, most_bytes)
        b = ModelRuns(model_b, call_b, inputs, snapshot, most_bytes)
        comparing = _Comparing(Tokens(tokens), factor)
        result = comparing.compare(a, b)
        for side in (1, 0):
            result = comparing.opened((a, b), side, result)
        return result


def check_factor(factor: float) -> None:
    """Raise ValueError unless a difference has to be above the noise."""
    if not factor > 1:
        raise ValueError(f"factor should be above 1, the noise floor itself, got {factor}")


class _Comparing:
    """Comparison of models by tokens that count, with a factor above the noise."""

    def __init__(self, tokens: Tokens, factor: float) -> None:
        self._tokens = tokens
        self._factor = factor

    def compare(self, a: ModelRuns, b: ModelRuns) -> Comparison:
        """Compare two models as they are, and 16-bit models also as copies in float32."""
        remarks: list[str] = []
        conventions: dict[Any, str] = {}
        noise = _measured(a, b, remarks)
        precise = None
        # Copies of a compiled model are not compiled, so they say nothing about it.
        if torch.finfo(noise.coarse).bits <= 16 and not (a.is_compiled or b.is_compiled):
            copies = _copies((a, b), remarks)
            if len(copies) == 2:
                in_float32 = _measured(copies[0], copies[1], remarks)
                pairs = match_calls(copies[0].calls, copies[1].calls, self._tokens)
                shaken = _shaken(pairs, copies)
                words = in_float32.words + "; rounding of what one model alone holds" * bool(shaken)
                in_float32 = in_float32._replace(shaken=shaken, words=words)
                noise = noise._replace(shaken=shaken)
                precise = self._comparer(copies, pairs, in_float32, conventions).compare()
        pairs = match_calls(a.calls, b.calls, self._tokens)
        comparer = self._comparer((a, b), pairs, noise, conventions)
        comparer.remarks += remarks
        result = comparer.compare()
        if precise is not None and result.equal is not None:
            result = _with_copies(result, precise, dtype_name(noise.coarse))
        return _with_parameters(comparer, result)

    def _comparer(
        self, models: Sequence[ModelRuns], pairs: list[CallPair], noise: Noise, conventions: dict[Any, str]
    ) -> Comparer:
        calls = models[0].calls, models[1].calls
        return Comparer(calls, pairs, self._tokens, self._factor, noise, conventions)

    def opened(self, models: tuple[ModelRuns, ModelRuns], side: int, result: Comparison) -> Comparison:
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
            inner = self.compare(*((models[0], opened) if side else (opened, models[1])))
            if inner.equal is not False or inner.first is None:
                gone = (
                    f"with its parts compiled one by one, {module_name(outer)} of {name} shows no difference"
                )
                words = f"{gone}: it comes from its own code, or from compiling the parts together"
                return replace(result, remarks=(*result.remarks, words))
            words = f"the parts of {module_name(outer)} of {name} were compiled one by one to name the module"
            result = replace(inner, remarks=(*inner.remarks, words))
            blamed = (inner.first.module_a, inner.first.module_b)[side]
            if blamed == outer or not is_in(blamed, outer):
                break
            outer = blamed
        return result


def _measured(a: ModelRuns, b: ModelRuns, remarks: list[str]) -> Noise:
    """Run the models in low and in high precision."""
    coarse = coarsest(a.dtype, b.dtype)
    low = torch.float32 if coarse is torch.float64 else coarse
    high = torch.float64 if low is torch.float32 else torch.float32
    runs = []
    for side, (model, counterpart) in enumerate(((a, b), (b, a))):
        if FLOATS.index(model.dtype) > FLOATS.index(counterpart.dtype):
            continue  # its weights are rounded already
        try:
            runs.append((side, model.run_in(low), model.run_in(high)))
        except Exception as error:  # of the user's code, which may know one precision only
            remarks.append(f"{'AB'[side]} did not run in {dtype_name(high)}: {spell(error)}")
    names = " and ".join("AB"[side] for side, *_ in runs)
    words = f"rounding error of {names}, run in {dtype_name(low)} and again in {dtype_name(high)}"
    words += ", scaled to float64" if coarse is torch.float64 else ""
    if not names:
        words = f"not measured, assumed to be 4 eps of {dtype_name(coarse)}"
    return Noise(coarse, coarsest(coarse, a.stored, b.stored), runs, words)


def _copies(models: tuple[ModelRuns, ModelRuns], remarks: list[str]) -> list[ModelRuns]:
    """Return copies in float32 of those models that run in it, with weights as the coarser of the two stores them."""
    copies = []
    for name, model in zip("AB", models, strict=True):
        try:
            copies.append(model.copied(torch.float32, coarsest(*(each.stored for each in models))))
        except Exception as error:  # of the user's code, which may know one precision only
            remarks.append(f"{name} did not run in float32: {spell(error)}")
    return copies


def _shaken(pairs: list[CallPair], models: list[ModelRuns]) -> list[tuple[int, Run, Run]]:
    """Run each model that alone holds a tensor in this way with that tensor shaken, as a cast may have rounded it.

    Such are a buffer of frequencies that the other side computes, and a weight into which a factor went. A buffer that
    modules of one kind have further apart than rounding makes it is a difference of its own.
    """
    stored = coarsest(*(model.stored for model in models))
    prints = [{key: fingerprint(x.to(stored)) for key, x in model.tensors().items()} for model in models]
    known: set[TensorKey] = set()
    for pair in pairs:
        tensors = [{*own_tensors(module)} for modules in pair.modules for module in modules]
        is_one_kind = are_of_a_kind(pair)
        unlike = {
            gap.name for gap in gaps(pair) if not (is_one_kind and gap.is_buffer and not gap.is_rounding)
        }
        shared = set.intersection(*tensors) - unlike
        known |= {(call.path, name) for side in pair.sides for call in side for name in shared}
    runs = []
    for side, model in enumerate(models):
        shared_prints = {*prints[1 - side].values()}
        keys = [
            key for key, number in prints[side].items() if number not in shared_prints and key not in known
        ]
        if keys:
            runs.append((side, model.run_in(model.dtype), model.run_copy(model.dtype, keys)))
    return runs


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


def _with_parameters(comparer: Comparer, result: Comparison) -> Comparison:
    """Return the result with what modules keep apart: a leaf with another parameter or eps is never equal."""
    pairs = {pair.names: pair for pair in reversed(comparer.pairs)}.values()
    leaves = [(pair, words) for pair in pairs if pair.is_leaf and (words := parameter_differences(pair))]
    # What makes up for another weight is another weight, or code: then all that follows agrees.
    is_lost = len(leaves) == 1 and comparer.spreads()
    faults = [(pair, words) for pair, words in leaves[::-1] if is_lost or comparer.agrees(pair)]
    if result.equal and faults:
        pair, words = faults[0]
        where = (
            "in its own parameters or eps; with these inputs the model's output shows no more than rounding"
        )
        result = replace(
            result, equal=False, first=comparer.module_error(pair), where=where, likely=tuple(words)
        )
    if result.equal is False and result.first is None:
        same_names = [pair for pair in list(pairs)[::-1] if len({*map(without_wrappers, pair.names)}) == 1]
        stored = next(((pair, gap.words) for pair in same_names for gap in gaps(pair)), None)
        if stored is not None:
            first = comparer.module_error(stored[0])
            return replace(result, first=first, where=result.why, why="", likely=(stored[1],))
    return result


class ModelRuns:
    """One of two models, and how to run it. `dtype` is that of most outputs, `stored` that of most parameters."""

    def __init__(
        self, model: nn.Module, call: _Caller | None, inputs: Any, snapshot: Snapshot, most_bytes: int
    ) -> None:
        # A compiled module is behind its path, the module that it was made of is the last there.
        self._modules: dict[str, list[nn.Module]] = {}
        for path, module in each_module(model):
            self._modules.setdefault(plain_path(path), []).append(module)
        self._plain = self._modules[""][-1]
        self._call = call
        self._inputs = inputs
        self._snapshot = snapshot
        self._most_bytes = most_bytes
        self._rounding: torch.dtype | None = None
        self._take(self._run(model, None))
        self.stored = most_common((x.dtype for x in each_parameter(model)), self.dtype)
        self._runs = {self.dtype: {call.key: call for call in self.calls}}

    def _take(self, calls: list[ModuleCall]) -> None:
        self.calls = calls
        self.dtype = most_common((x.dtype for call in calls for x in call.outputs), torch.float32)

    @property
    def is_compiled(self) -> bool:
        """Whether any of its modules is."""
        return any(map(self.is_compiled_at, self._modules))

    def is_compiled_at(self, path: str) -> bool:
        """Return whether the module of this path is compiled."""
        return any(map(is_compiled, self._modules.get(path, ())))

    def tensors(self) -> dict[TensorKey, Tensor]:
        """Return parameters and buffers of floating-point dtypes by module and name, rounded where the copies' are."""
        return {
            (path, name): x if self._rounding is None else x.to(self._rounding)
            for path, modules in self._modules.items()
            for name, x in own_tensors(modules[-1]).items()
        }

    def run_in(self, dtype: torch.dtype) -> Run:
        """Return the calls of a copy in this dtype, or of the model itself where that is its own."""
        if dtype not in self._runs:
            self._runs[dtype] = self.run_copy(dtype)
        return self._runs[dtype]

    def copied(self, dtype: torch.dtype, stored: torch.dtype) -> ModelRuns:
        """Return the model as a copy in `dtype`, with weights that are rounded to `stored` before."""
        copied = copy.copy(self)
        if coarsest(stored, self.stored) is not self.stored:
            copied._rounding, copied.stored, copied._runs = stored, stored, {}
        copied._take(list(copied.run_in(dtype).values()))
        if copied.dtype is not dtype:
            raise ValueError(f"it computes in {dtype_name(copied.dtype)} there too")
        return copied

    def run_copy(self, dtype: torch.dtype, shaken: Sequence[TensorKey] = ()) -> Run:
        """Return the calls of a copy, with these tensors as far from their values as rounding may have put them."""
        model = copy.deepcopy(self._plain)
        for _, module in each_module(model):
            for name, child in module._modules.items():
                if child is not None and COMPILED in child._modules:
                    module._modules[name] = child._modules[COMPILED]
            for name in compiled_in_place(module):
                del vars(module)[name]
        if self._rounding is not None:
            model.to(self._rounding)
        modules = dict(each_module(model))
        steps = [torch.finfo(own_tensors(modules[path])[name].dtype).eps / 2 for path, name in shaken]
        model.to(dtype)
        generator = torch.Generator().manual_seed(0)
        for (path, name), step in zip(shaken, steps, strict=True):
            x = own_tensors(modules[path])[name]
            x.mul_(1 + step * (torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1))
        if self.dtype is not self.stored:  # the call makes it compute under autocast
            device = next((x.device.type for x in each_parameter(model)), "cpu")
            model.forward = torch.autocast(device, enabled=False)(model.forward)
        calls = self._run(model, dtype)
        for call in calls:
            call.module = self._modules[call.path][-1]  # so that the copy is freed
        return {call.key: call for call in calls}

    def _run(self, model: nn.Module, dtype: torch.dtype | None) -> list[ModuleCall]:
        """Run a model on the inputs, cast to this dtype, and return the calls in the order of their starts."""
        self._snapshot.restore()
        device = next((x.device for x in each_parameter(model)), None)

        def moved(x: Tensor) -> Tensor:
            return x.detach().clone().to(device, dtype if x.is_floating_point() else None)

        inputs = _pytree.tree_map_only(Tensor, moved, self._inputs)
        with torch.no_grad(), recorded(model, self._most_bytes) as calls:
            if self._call is not None:
                self._call(model, inputs)
            elif isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
        root = next((call for call in reversed(calls) if call.parent is None), None)
        if root is None:
            raise ValueError(f"no module of the {type(model).__name__} was called: see call_a and call_b")
        inside = [call for call in calls if call is root or root.holds(call)]  # a warm-up comes before
        return sorted(inside, key=lambda call: call.start)

    def compiler_of(self, path: str) -> Callable[[nn.Module], nn.Module]:
        """Return the function that compiles a module as this one was. Raise ValueError where PyTorch keeps none."""
        module = next(module for module in self._modules[path] if is_compiled(module))
        context: Any = getattr(module, "dynamo_ctx", None)
        for function in compiled_in_place(module).values():
            kept = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
            context = next((content for content in kept if hasattr(content, "compiler_config")), context)
        if not callable(context):
            raise ValueError("it is compiled in a way that cannot be repeated for its parts")
        compiler: Callable[[nn.Module], nn.Module] = context
        return compiler

    def with_compiled_parts(
        self, path: str, compile_part: Callable[[nn.Module], nn.Module]
    ) -> ModelRuns | None:
        """Return the model with the parts of this module compiled, and the module not; None where it calls no parts."""
        eager = next((run for dtype, run in self._runs.items() if dtype is not self.dtype), {}).values()
        parts = dict.fromkeys(call.path for call in eager if call.parent and call.parent.path == path)
        if not parts:
            return None
        opened = copy.copy(self)
        holders = [outer for outer in self._modules if is_in(path, outer)]
        with ExitStack() as after:
            for module in (module for outer in holders for module in self._modules[outer]):
                for name, function in compiled_in_place(module).items():
                    del vars(module)[name]
                    after.callback(vars(module).__setitem__, name, function)
            swaps = [(outer, self._modules[outer][-1]) for outer in holders if outer]
            swaps += [(part, compile_part(self._modules[part][-1])) for part in parts]
            for place, module in swaps:
                holder, _, name = place.rpartition(".")
                children = self._modules[holder][-1]._modules
                after.callback(children.__setitem__, name, children[name])
                children[name] = module
            # Beyond its limit of compiled copies of one function, torch.compile lets the others run eagerly.
            limits: Any = {"recompile_limit": _MOST_PARTS, "accumulated_recompile_limit": _MOST_PARTS}
            after.enter_context(torch._dynamo.config.patch(**limits))
            opened.calls = opened._run(self._plain, None)
        opened._runs = {**self._runs, self.dtype: {call.key: call for call in opened.calls}}
        return opened
