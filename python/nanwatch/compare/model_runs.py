"""Runs of one model for a comparison: as it is, as a copy in another precision, with rounded weights, or compiled."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..numerics.readable import dtype_name
from ..util.modules import each_module, each_parameter, is_in
from .calls import COMPILED, ModuleCall, Runs, is_compiled, recorded
from .snapshot import Snapshot
from .tensors import FLOATS, Store
from .words import own_tensors

Caller = Callable[[nn.Module, Any], Any]
# Path of a module, and name of its parameter or buffer.
TensorKey = tuple[str, str]
_COMPILED_CALL = "_compiled_call_impl"
_MOST_PARTS = 1 << 12


class ModelRuns:
    """One of two models, and how to run it. `dtype` is that of most outputs, `stored` that of most parameters."""

    def __init__(
        self, model: nn.Module, call: Caller | None, inputs: Any, snapshot: Snapshot, most_bytes: int
    ) -> None:
        # A compiled module is behind its path, the module that it was made of is the last there.
        self._modules: dict[str, list[nn.Module]] = {}
        for path, module in each_module(model):
            plain = ".".join(part for part in path.split(".") if part != COMPILED)
            self._modules.setdefault(plain, []).append(module)
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
        if FLOATS.index(stored) > FLOATS.index(self.stored):
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

    # Compiled models.

    def compiler_of(self, path: str) -> Callable[[nn.Module], nn.Module] | None:
        """Return the function that compiles a module as the one of this path was, None where PyTorch keeps none."""
        compiled = next(module for module in self._modules[path] if is_compiled(module))
        context: Any = getattr(compiled, "dynamo_ctx", None)
        if COMPILED not in compiled._modules:
            cells = getattr(vars(compiled)[_COMPILED_CALL], "__closure__", None) or ()
            kept = [cell.cell_contents for cell in cells]
            context = next((value for value in kept if hasattr(value, "compiler_config")), None)
        return context if callable(context) else None

    def parts_of(self, path: str) -> list[str]:
        """Return the paths of the modules that the module of this path calls when it is not compiled."""
        runs = (run for dtype, run in self._runs.items() if dtype is not self.dtype)
        called = next(runs, {}).values()
        return list(dict.fromkeys(call.path for call in called if call.parent and call.parent.path == path))

    def in_parts(
        self, path: str, parts: Sequence[str], compile_part: Callable[[nn.Module], nn.Module]
    ) -> ModelRuns:
        """Return the model with these parts compiled, and the module of `path`, which holds them, not compiled."""
        opened = copy.copy(self)
        holders = [outer for outer in self._modules if is_in(path, outer)]
        with ExitStack() as after:
            for module in (module for outer in holders for module in self._modules[outer]):
                if (call := vars(module).pop(_COMPILED_CALL, None)) is not None:
                    after.callback(vars(module).__setitem__, _COMPILED_CALL, call)
            swaps = [(outer, self._modules[outer][-1]) for outer in holders if outer]
            swaps += [(part, compile_part(self._modules[part][-1])) for part in parts]
            for place, module in swaps:
                holder, _, name = place.rpartition(".")
                children = self._modules[holder][-1]._modules
                after.callback(children.__setitem__, name, children[name])
                children[name] = module
            # Beyond its limit of compiled copies of one function, torch.compile lets the others run eagerly.
            after.enter_context(
                torch._dynamo.config.patch(
                    recompile_limit=_MOST_PARTS, accumulated_recompile_limit=_MOST_PARTS
                )
            )
            opened.calls = opened._run(self._plain, None)
        opened._runs = {**self._runs, self.dtype: {call.key: call for call in opened.calls}}
        return opened

    def _run_copy(self, dtype: torch.dtype, shaken: Iterable[TensorKey]) -> Runs:
        model = copy.deepcopy(self._plain)
        for _, module in each_module(model):
            for name, child in module._modules.items():
                if child is not None and COMPILED in child._modules:
                    module._modules[name] = child._modules[COMPILED]
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


def _dtype_of(calls: Sequence[ModuleCall]) -> torch.dtype:
    return most_common((kept.rows.dtype for call in calls for kept in call.outputs), torch.float32)


def most_common(dtypes: Iterable[torch.dtype], otherwise: torch.dtype) -> torch.dtype:
    """Return the commonest of the floating-point dtypes, or `otherwise` where there is none."""
    known = [dtype for dtype, _ in Counter(dtypes).most_common() if dtype in FLOATS]
    return known[0] if known else otherwise
