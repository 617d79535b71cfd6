"""Runs of one model for a comparison: as it is, as a copy in another precision, with rounded weights, or compiled."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..numerics.readable import dtype_name
from ..util.modules import each_module, each_parameter, is_in
from .calls import COMPILED, ModuleCall, Runs, is_compiled, plain_path, recorded
from .snapshot import Snapshot
from .tensors import FLOATS, Store, coarsest
from .words import own_tensors

Caller = Callable[[nn.Module, Any], Any]
# Path of a module, and name of its parameter or buffer.
TensorKey = tuple[str, str]
# Attributes of a module in which a compiled function takes the place of its own.
_IN_PLACE = ("_compiled_call_impl", "forward")
_MOST_PARTS = 1 << 12


class ModelRuns:
    """One of two models, and how to run it. `dtype` is that of most outputs, `stored` that of most parameters."""

    def __init__(
        self, model: nn.Module, call: Caller | None, inputs: Any, snapshot: Snapshot, most_bytes: int
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
        self.calls = self._run(model, None)
        self.dtype = _dtype_of(self.calls)
        self.stored = most_common((x.dtype for x in each_parameter(model)), self.dtype)
        self._runs = {self.dtype: {call.key: call for call in self.calls}}

    @property
    def is_compiled(self) -> bool:
        """Whether any of its modules is."""
        return any(map(self.is_compiled_at, self._modules))

    def is_compiled_at(self, path: str) -> bool:
        """Return whether the module of this path is compiled."""
        return any(map(is_compiled, self._modules.get(path, ())))

    def run_in(self, dtype: torch.dtype) -> Runs:
        """Return the calls of a copy in this dtype, or of the model itself where that is its own."""
        if dtype not in self._runs:
            self._runs[dtype] = self._run_copy(dtype, ())
        return self._runs[dtype]

    def copied(self, dtype: torch.dtype, stored: torch.dtype) -> ModelRuns:
        """Return the model as a copy in `dtype`, with weights that are rounded to `stored` before."""
        copied = copy.copy(self)
        if coarsest(stored, self.stored) is not self.stored:
            copied._rounding, copied.stored, copied._runs = stored, stored, {}
        copied.calls = list(copied.run_in(dtype).values())
        copied.dtype = _dtype_of(copied.calls)
        if copied.dtype is not dtype:
            raise ValueError(f"it computes in {dtype_name(copied.dtype)} there too")
        return copied

    def shaken(self, keys: Iterable[TensorKey]) -> Runs:
        """Return the calls of a copy, with these tensors as far from their values as rounding may have put them."""
        return self._run_copy(self.dtype, keys)

    def tensors(self) -> dict[TensorKey, Tensor]:
        """Return the parameters and buffers of floating-point dtypes, rounded where the copies' are."""
        return {
            (path, name): x if self._rounding is None else x.to(self._rounding)
            for path, modules in self._modules.items()
            for name, x in own_tensors(modules[-1]).items()
        }

    def compiler_of(self, path: str) -> Callable[[nn.Module], nn.Module]:
        """Return the function that compiles a module as this one was. Raise ValueError where PyTorch keeps none."""
        module = next(module for module in self._modules[path] if is_compiled(module))
        context: Any = getattr(module, "dynamo_ctx", None)
        for function in _compiled_in_place(module).values():
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
                for name, function in _compiled_in_place(module).items():
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

    def _run_copy(self, dtype: torch.dtype, shaken: Iterable[TensorKey]) -> Runs:
        model = copy.deepcopy(self._plain)
        for _, module in each_module(model):
            for name, child in module._modules.items():
                if child is not None and COMPILED in child._modules:
                    module._modules[name] = child._modules[COMPILED]
            for name in _compiled_in_place(module):
                del vars(module)[name]
        if self._rounding is not None:
            model.to(self._rounding)
        modules = dict(each_module(model))
        steps = [(key, torch.finfo(own_tensors(modules[key[0]])[key[1]].dtype).eps / 2) for key in shaken]
        model.to(dtype)
        generator = torch.Generator().manual_seed(0)
        for (path, name), step in steps:
            x = own_tensors(modules[path])[name]
            signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
            x.mul_(1 + step * signs)
        if self.dtype is not self.stored:  # the call makes it compute under autocast
            device = next((x.device.type for x in each_parameter(model)), "cpu")
            model.forward = torch.autocast(device, enabled=False)(model.forward)
        calls = self._run(model, dtype)
        for call in calls:
            call.module = self._modules[call.path][-1]  # so that the copy is freed
        return {call.key: call for call in calls}

    def _run(self, model: nn.Module, dtype: torch.dtype | None) -> list[ModuleCall]:
        self._snapshot.restore()
        device = next((x.device for x in each_parameter(model)), None)

        def moved(x: Tensor) -> Tensor:
            return x.detach().clone().to(device, dtype if x.is_floating_point() else None)

        inputs = tree_map_only(Tensor, moved, self._inputs)
        with torch.no_grad(), recorded(model, Store(self._most_bytes)) as calls:
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


def _compiled_in_place(module: nn.Module) -> dict[str, Any]:
    """Return the compiled functions that `module.compile()`, or an assignment, has put into a module."""
    space = vars(module)
    return {name: space[name] for name in _IN_PLACE if hasattr(space.get(name), "_torchdynamo_orig_callable")}


def _dtype_of(calls: Iterable[ModuleCall]) -> torch.dtype:
    return most_common((kept.rows.dtype for call in calls for kept in call.outputs), torch.float32)


def most_common(dtypes: Iterable[torch.dtype], otherwise: torch.dtype) -> torch.dtype:
    """Return the commonest of the floating-point dtypes, or `otherwise` where there is none."""
    known = [dtype for dtype, _ in Counter(dtypes).most_common() if dtype in FLOATS]
    return known[0] if known else otherwise
