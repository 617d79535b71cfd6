"""State that a run changes: what PyTorch can put back, and what a function leaves in the objects that it refers to."""

from __future__ import annotations

import copy
import functools
import gc
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..instrumentation.execution_context import RngState
from ..numerics._extension import instances_of
from ..util.modules import each_module
from ..util.program_code import is_library, names_of
from ..util.visible import suppressing
from .calls import IN_PLACE

# Attributes of a module that stay as they are: its parts, and the functions that torch.compile puts there.
_LEFT_ALONE = frozenset({"_modules", *IN_PLACE})
_GENERATORS = (torch.Generator, random.Random)
# A step that refers to more objects than these is not searched to the end.
_MOST_OBJECTS = 20_000
_MOST_ITEMS = 1000


class Snapshot:
    """State of modules, optimizers, other stateful objects, and all global random states, at one moment.

    Modules and optimizers: all attributes, with the values and gradients of tensors. Random number generators and
    tensors: their values. Anything else: its state_dict(). `restore()` puts it back, as often as is wanted.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self.modules: list[nn.Module] = []
        self._tensors: dict[int, Tensor] = {}
        self._restores = [restore for value in objects for restore in self._restores_of(value)]
        self._rng = RngState.capture(others=True)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore at the end of the block, with the version counters of the tensors as they were."""
        tensors = tuple(x for x in self._tensors.values() if not x.is_inference())
        versions = tuple(x._version for x in tensors)
        try:
            yield
        finally:
            self.restore()
            torch._C._autograd._unsafe_set_version_counter(tensors, versions)

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for restore in self._restores:
                restore()
        self._rng.restore()

    def _restores_of(self, value: Any) -> list[Callable[[], object]]:
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return [self._saved_space(vars(module)) for _, module in each_module(value)]
        if isinstance(value, Optimizer):
            return [self._saved_space(vars(value))]
        if isinstance(value, (Tensor, *_GENERATORS)):
            return [self._saved(value)]
        if _has_state(value):
            content = copy.deepcopy(value.state_dict())
            return [lambda: value.load_state_dict(copy.deepcopy(content))]
        raise TypeError(
            f"state should hold modules, optimizers, tensors, random number generators and objects with"
            f" state_dict() and load_state_dict(), got {type(value).__name__}"
        )

    def _saved_space(self, space: dict[str, Any]) -> Callable[[], object]:
        """Return a function that gives an object the attributes that it has now."""
        known = {*space, *_LEFT_ALONE}
        kept = {name: self._saved(space[name]) for name in space if name not in _LEFT_ALONE}

        def restore() -> None:
            for name in space.keys() - known:
                del space[name]
            space.update({name: value() for name, value in kept.items()})

        return restore

    def _saved(self, value: Any) -> Callable[[], Any]:
        """Return a function that returns `value` as it is now: the same objects, with the same contents."""
        if isinstance(value, Tensor):
            return self._saved_tensor(value)
        if isinstance(value, dict):
            items = {key: self._saved(item) for key, item in value.items()}
            return lambda: _refill(value, {key: item() for key, item in items.items()})
        if isinstance(value, list | set):
            parts = [self._saved(item) for item in value]
            return lambda: _refill(value, [part() for part in parts])
        if isinstance(value, _GENERATORS):
            write = value.set_state if isinstance(value, torch.Generator) else value.setstate
            state: Any = value.get_state() if isinstance(value, torch.Generator) else value.getstate()
            return lambda: (write(state), value)[1]
        return lambda: value

    def _saved_tensor(self, x: Tensor) -> Callable[[], Tensor]:
        if id(x) in self._tensors or nn.parameter.is_lazy(x):
            return lambda: x
        self._tensors[id(x)] = x
        content = x.detach().clone()
        gradient = None if not x.is_leaf or x.grad is None else self._saved_tensor(x.grad)

        def restore() -> Tensor:
            with torch.inference_mode(x.is_inference()):
                x.detach().copy_(content)
            if x.is_leaf and (x.requires_grad or x.grad is not None):
                x.grad = None if gradient is None else gradient()
            return x

        return restore


def _refill(value: Any, content: Any) -> Any:
    """Put these items into a dict, list or set in place of its own, and return it."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)
    return value


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
            if isinstance(value, (nn.Module, Optimizer, *_GENERATORS)) or is_leaf or _has_state(value):
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
    if isinstance(value, types.FunctionType):
        if is_library(value.__code__.co_filename):
            return []
        named = (value.__globals__.get(name) for name in names_of(value.__code__))
        return [*(value.__closure__ or ()), *named, *(value.__defaults__ or ())]
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    is_programs = isinstance(value, functools.partial) or not is_library(file)
    return gc.get_referents(value)[:_MOST_ITEMS] if is_programs else []
