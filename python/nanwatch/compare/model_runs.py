"""Runs of a model: the calls of its modules, in its own precision and in others, from the same state each time."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from ..instrumentation.execution_context import RngState, TemporaryWrapper, attached
from ..numerics._reference import without_repeats
from ..numerics.readable import dtype_name
from ..recording.walk import Leaf, call_leaves, leaves
from ..util.program import each_module, each_parameter, is_in
from .calls import ModuleCall, Run, coarsest, most_common, own_tensors, run_of

# How to call a model on the inputs.
Caller = Callable[[nn.Module, Any], Any]
# Path of a module, and name of its parameter or buffer.
TensorKey = tuple[str, str]
_COMPILED = "_orig_mod"  # the part of a path that torch.compile adds
# Attributes of a module in which a compiled function takes the place of its own.
_IN_PLACE = ("_compiled_call_impl", "forward")


def snapshot(models: Iterable[nn.Module]) -> Callable[[], None]:
    """Return a function that puts back the present state of models, and all global random states, in every call.

    The state has the attributes of all modules, the contents of the dicts, lists and sets in them at any depth, the
    values, gradients and version counters of tensors, and the states of generators.
    """
    writes: list[Callable[[], object]] = [RngState.capture(others=True).restore]
    values: list[Any] = [vars(module) for model in models for _, module in each_module(model)]
    known: set[int] = set()
    for x in values:  # grows by what is in containers, and by gradients
        if id(x) in known:
            continue
        known.add(id(x))
        if isinstance(x, dict | list | set):
            writes.append(partial(_write_container, x, dict(x) if isinstance(x, dict) else list(x)))
            values += x.values() if isinstance(x, dict) else x
        elif isinstance(x, Tensor) and not nn.parameter.is_lazy(x):
            if without_repeats(x)[1] > 1:
                continue  # expanded: PyTorch refuses to write to it
            gradient, version = x.grad if x.is_leaf else None, None if x.is_inference() else x._version
            writes.append(partial(_write_tensor, x, x.detach().clone(), gradient, version))
            values.append(gradient)
        elif isinstance(x, torch.Generator):
            writes.append(partial(x.set_state, x.get_state()))
        elif isinstance(x, random.Random):
            writes.append(partial(x.setstate, x.getstate()))

    @torch.no_grad()
    def restore() -> None:
        for write in writes:
            write()

    return restore


def _write_container(container: Any, content: Any) -> None:
    # An unchanged one is left alone: other threads may use it, as the attributes of a module.
    items = (itertools.chain(*x.items()) if isinstance(x, dict) else x for x in (container, content))
    before, now = ([id(x) for x in side] for side in items)
    if before != now:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(content)


def _write_tensor(x: Tensor, value: Tensor, gradient: Tensor | None, version: int | None) -> None:
    with torch.inference_mode(version is None):
        x.detach().copy_(value)
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((x,), (version,))
    if x.is_leaf and (x.requires_grad or x.grad is not None):
        x.grad = gradient


class ModelRuns:
    """A model and its runs.

    `modules` are by their paths, without what torch.compile has put around them, and `compiled` are the paths of
    those that it has. `run` has the calls of the model as it is, `dtype` is that of most outputs there, `stored` that
    of most parameters.
    """

    def __init__(
        self, model: nn.Module, call: Caller | None, inputs: Any, restore: Callable[[], None], most_bytes: int
    ) -> None:
        modules = [(_plain_path(path), module) for path, module in each_module(model)]
        self.modules = dict(modules)  # a compiled module comes before the one that it was made of
        self.compiled = {path for path, module in modules if _is_compiled(module)}
        self._call, self._inputs, self._restore, self._most_bytes = call, inputs, restore, most_bytes
        restore()
        self.run = self._run(model, None)
        self.dtype = _dtype_of(self.run)
        self.stored = most_common((x.dtype for x in each_parameter(model)), self.dtype)
        self._runs: dict[Any, Run] = {(self.dtype, self.stored, ()): self.run}

    def run_in(
        self, dtype: torch.dtype, stored: torch.dtype | None = None, shaken: Sequence[TensorKey] = ()
    ) -> Run:
        """Return the calls in `dtype` with weights rounded to `stored`: of a copy, unless the model is like this.

        The tensors that are `shaken` are as far from their values as rounding may have put them.
        """
        stored = coarsest(stored or self.stored, self.stored)
        key = dtype, stored, tuple(shaken)
        if key in self._runs:
            return self._runs[key]
        self._restore()  # before the copy, as the last run may have written buffers
        model = copy.deepcopy(self.modules[""])
        for _, module in each_module(model):
            for name, child in module._modules.items():
                if child is not None and _COMPILED in child._modules:
                    module._modules[name] = child._modules[_COMPILED]
            for name in _compiled_in_place(module):
                del vars(module)[name]
        if stored is not self.stored:
            model.to(stored)
        modules = dict(each_module(model))
        steps = [torch.finfo(own_tensors(modules[path])[name].dtype).eps / 2 for path, name in shaken]
        model.to(dtype)
        generator = torch.Generator().manual_seed(0)
        for (path, name), step in zip(shaken, steps, strict=True):
            x, _ = without_repeats(own_tensors(modules[path])[name])
            x.mul_(1 + step * (torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1))
        if self.dtype is not self.stored:  # the call makes it compute under autocast
            device = next((x.device.type for x in each_parameter(model)), "cpu")
            model.forward = torch.autocast(device, enabled=False)(model.forward)
        run = self._run(model, dtype)
        if (computed := _dtype_of(run)) is not dtype:
            raise ValueError(f"it computes in {dtype_name(computed)} there too")
        for call in run.values():
            call.module = self.modules[call.path]  # so that the copy is freed
        self._runs[key] = run
        return run

    def _run(self, model: nn.Module, dtype: torch.dtype | None) -> Run:
        """Run a model on the inputs, cast to this dtype, and return the calls, without those of a warm-up before."""
        device = next((x.device for x in each_parameter(model)), None)

        def moved(x: Tensor) -> Tensor:
            return x.detach().clone().to(device, dtype if x.is_floating_point() else None)

        inputs = _pytree.tree_map_only(Tensor, moved, self._inputs)
        log = _CallLog(self._most_bytes)
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        with torch.no_grad(), attached(log.wrappers(model)):
            if self._call is not None:
                self._call(model, inputs)
            else:
                model(**inputs) if isinstance(inputs, Mapping) else model(*args)
        if (root := log.root) is None:
            raise ValueError(f"no module of the {type(model).__name__} was called: see call_a and call_b")
        return run_of(call for call in log.calls if call is root or root.holds(call))


def _dtype_of(run: Run) -> torch.dtype:
    return most_common((x.dtype for call in run.values() for x in call.outputs), torch.float32)


def _compiled_in_place(module: nn.Module) -> list[str]:
    """Return the attributes in which `module.compile()`, or an assignment, has put a compiled function."""
    return [name for name in _IN_PLACE if hasattr(vars(module).get(name), "_torchdynamo_orig_callable")]


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made the module, or compiled its call or its forward."""
    return _COMPILED in module._modules or bool(_compiled_in_place(module))


def _plain_path(path: str) -> str:
    """Return the path of a module without the parts that torch.compile adds."""
    return ".".join(part for part in path.split(".") if part != _COMPILED)


class _CallLog:
    """Calls that this thread makes of a model and its parts, in the order in which they end.

    Raises ValueError in a call where the copies of the tensors need more memory.
    """

    def __init__(self, most_bytes: int) -> None:
        self.calls: list[ModuleCall] = []
        self.root: ModuleCall | None = None  # the latest call that is in no other
        self._num_open = 0
        self._thread = threading.get_ident()
        self._clock = itertools.count()
        self._most_bytes = self._left = most_bytes
        self._copies = WeakIdKeyDictionary()

    def wrappers(self, model: nn.Module) -> Iterator[TemporaryWrapper]:
        """Yield the wrappers that record. Compiled modules are left as they are: their parts have none."""
        compiled = [path for path, module in each_module(model) if _is_compiled(module)]
        for path, module in each_module(model):
            if not any(path != outer and is_in(path, outer) for outer in compiled):
                yield TemporaryWrapper(module, partial(self._record, _plain_path(path)))

    def _record(self, path: str, wrapper: TemporaryWrapper, args: Any, kwargs: Any) -> Any:
        if is_compiling() or threading.get_ident() != self._thread:
            return wrapper.run_inner(args, kwargs)
        module = wrapper.module
        call = ModuleCall(path, type(module).__name__, module, next(self._clock))
        call.inputs = self._copied(call_leaves(args, kwargs))
        self._num_open += 1
        try:
            result = wrapper.run_inner(args, kwargs)
        finally:
            self._num_open -= 1
        call.end = next(self._clock)
        call.shapes = tuple(tuple(x.shape) for x in module._parameters.values() if x is not None)
        call.outputs = [x for x in self._copied(leaves(result, "output")) if x.is_floating_point()]
        self.calls.append(call)
        self.root = self.root if self._num_open else call
        return result

    def _copied(self, values: list[Leaf]) -> list[Tensor]:
        """Return copies of the tensors among the values; that of a tensor, unchanged since, is one object."""
        copies = []
        for _, x in values:
            is_strided = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta
            if not is_strided or x.dtype is torch.bool or not x.numel():
                continue
            version = -1 if x.is_inference() else x._version
            known = self._copies.get(x)
            if known is None or known[0] != version or version == -1:
                flat = torch.view_as_real(x.detach()).flatten(-2) if x.is_complex() else x.detach()
                known = self._copies[x] = version, flat.to("cpu", copy=True)
                self._left -= known[1].nbytes
            if self._left < 0:
                hint = "pass fewer tokens, a part of the model, or a larger most_bytes"
                raise ValueError(
                    f"the tensors of a run take more than most_bytes={self._most_bytes:,}; {hint}"
                )
            copies.append(known[1])
        return copies
