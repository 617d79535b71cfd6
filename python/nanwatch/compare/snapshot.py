"""State that a run changes: what PyTorch can put back, and what a function leaves in the objects that it refers to."""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from ..instrumentation.execution_context import RngState
from ..numerics._extension import instances_of
from ..util.modules import each_module
from ..util.program_code import is_library, names_of
from ..util.visible import suppressing

Restore = Callable[[], object]
_MODULE_PARTS = frozenset(vars(nn.Module())) - {"training"}
# Where torch.compile puts functions.
_FUNCTIONS = {"forward", "_compiled_call_impl"}


class Snapshot:
    """State of modules, optimizers, other stateful objects, and all global random states, at one moment.

    Modules: parameters, buffers, gradients, training flags, plain attributes. Optimizers: state and groups. Random
    number generators and tensors: their values. Anything else: its state_dict(). `restore()` puts it back, as often as
    is wanted.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self.modules: list[nn.Module] = []
        self._restores: list[Restore] = []
        self._tensors: dict[int, Tensor] = {}
        for value in objects:
            self._add(value)
        self._rng = RngState.capture(others=True)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore at the end of the block, with the version counters of the tensors as they were."""
        with ExitStack() as counters:
            for x in self._tensors.values():
                if not x.is_inference():
                    counters.enter_context(_unsafe_preserve_version_counter(x))
            try:
                yield
            finally:
                self.restore()

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for restore in self._restores:
                restore()
        self._rng.restore()

    def _add(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self.modules.append(value)
            for _, module in each_module(value):
                for content in (module._parameters, module._buffers):
                    self._restores.append(functools.partial(refill, content, dict(content)))
                    for x in content.values():
                        self._add_tensor(x)
                self._add_attributes(vars(module))
        elif isinstance(value, Optimizer):
            for group in value.param_groups:
                for x in group["params"]:
                    self._add_tensor(x)
                options = {key: saved(option) for key, option in group.items() if key != "params"}
                self._restores.append(functools.partial(_update, group, options))
            self._restores.append(saved(value.state))
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, torch.Generator | random.Random):
            self._restores.append(saved(value))
        elif _has_state(value):
            content = copy.deepcopy(value.state_dict())
            self._restores.append(lambda: value.load_state_dict(copy.deepcopy(content)))
        else:
            raise TypeError(
                f"state should hold modules, optimizers, tensors, random number generators and objects with"
                f" state_dict() and load_state_dict(), got {type(value).__name__}"
            )

    def _add_attributes(self, space: dict[str, Any]) -> None:
        """Add what a module keeps beside parameters, buffers, parts, hooks and functions."""
        known = {*space, *_MODULE_PARTS}
        kept = {name: saved(space[name]) for name in space if name not in _MODULE_PARTS | _FUNCTIONS}

        def restore() -> None:
            for name in space.keys() - known:
                del space[name]
            space.update({name: value() for name, value in kept.items()})

        self._restores.append(restore)

    def _add_tensor(self, x: Tensor | None) -> None:
        if x is None or id(x) in self._tensors or nn.parameter.is_lazy(x):
            return
        self._tensors[id(x)] = x
        content, gradient = saved(x), None if not x.is_leaf or x.grad is None else saved(x.grad)

        def restore() -> None:
            content()
            if x.is_leaf and (x.requires_grad or x.grad is not None):
                x.grad = None if gradient is None else gradient()

        self._restores.append(restore)


def saved(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value` as it is now: the same objects, with the same contents."""
    if isinstance(value, Tensor):
        content = value.detach().clone()

        def restore() -> Tensor:
            with torch.inference_mode(value.is_inference()):
                value.detach().copy_(content)
            return value

        return restore
    if isinstance(value, dict):
        items = {key: saved(item) for key, item in value.items()}
        return lambda: refill(value, {key: item() for key, item in items.items()})
    if isinstance(value, list | set):
        parts = [saved(item) for item in value]
        return lambda: refill(value, [part() for part in parts])
    if isinstance(value, torch.Generator | random.Random):
        write = value.set_state if isinstance(value, torch.Generator) else value.setstate
        state: Any = value.get_state() if isinstance(value, torch.Generator) else value.getstate()
        return lambda: (write(state), value)[1]
    return lambda: value


def refill(value: Any, content: Any) -> Any:
    """Put these items into a dict, list or set in place of its own, and return it."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)
    return value


def _update(group: dict[str, Any], options: dict[str, Callable[[], Any]]) -> None:
    group.update({key: option() for key, option in options.items()})


# A step that refers to more objects than these is not searched to the end.
_MOST_OBJECTS = 20_000
_MOST_ITEMS = 1000


def stateful(step: Callable[..., Any]) -> list[Any]:
    """Return what PyTorch can put back of the objects that a function refers to, modules first.

    These are modules, the optimizers that hold their parameters, objects with state_dict(), and leaf tensors that
    require a gradient: in closures, in globals that it names, in attributes of the object that it is a method of.
    """
    state: list[Any] = []
    seen: dict[int, Any] = {}  # with the objects, so that no other one gets their ids
    ahead: list[Any] = [step]
    while ahead and len(seen) < _MOST_OBJECTS:
        value = ahead.pop()
        if id(value) in seen or isinstance(value, types.ModuleType | type | str | int | float | None):
            continue
        seen[id(value)] = value
        with suppressing("an object that a step refers to could not be entered"):
            is_leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
            kinds = nn.Module | Optimizer | torch.Generator | random.Random
            if isinstance(value, kinds) or is_leaf or _has_state(value):
                state.append(value)
                seen |= {id(part): part for part in value.modules()} if isinstance(value, nn.Module) else {}
            else:
                ahead += _parts_of(value)
    parameters = {id(x) for value in state if isinstance(value, nn.Module) for x in value.parameters()}
    for optimizer in instances_of(Optimizer):
        groups = getattr(optimizer, "param_groups", ())
        is_of_step = any(id(x) in parameters for group in groups for x in group["params"])
        state += [optimizer] if is_of_step and id(optimizer) not in seen else []
    return sorted(state, key=lambda value: not isinstance(value, nn.Module))


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _parts_of(value: Any) -> Iterable[Any]:
    """Return the objects that a value of the program holds."""
    if isinstance(value, list | tuple | set | dict):
        return list(value.values() if isinstance(value, dict) else value)[:_MOST_ITEMS]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        if is_library(value.__code__.co_filename):
            return []
        named = (value.__globals__.get(name) for name in names_of(value.__code__))
        return [*(value.__closure__ or ()), *named, *(value.__defaults__ or ())]
    if isinstance(value, types.CellType):
        return [value.cell_contents]  # ValueError for a variable without a value is suppressed
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:
        return [wrapped]
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    is_programs = type(value).__module__ != "builtins" and not is_library(file)
    return list(getattr(value, "__dict__", {}).values()) if is_programs else []
