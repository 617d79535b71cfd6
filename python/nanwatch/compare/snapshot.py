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
from ..numerics.ranges import fingerprint
from ..recording.walk import leaves
from ..util.modules import each_module
from ..util.program_code import is_library, names_of
from ..util.visible import suppressing

Restore = Callable[[], object]
_MODULE_PARTS = frozenset(vars(nn.Module()))


class Snapshot:
    """State of modules, optimizers, other stateful objects, and all global random states, at one moment.

    Modules: parameters, buffers, gradients, training flags. Optimizers: state and groups. Random number generators and
    tensors: their values. Anything else: its state_dict(). `restore()` puts it back, as often as is wanted.
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
                self._restores.append(functools.partial(setattr, module, "training", module.training))
        elif isinstance(value, Optimizer):
            for group in value.param_groups:
                for x in group["params"]:
                    self._add_tensor(x)
                self._restores.append(
                    saved({key: one for key, one in group.items() if key != "params"}, group)
                )
            self._restores.append(saved(value.state))
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif (restore := restorer(value)) is not None:
            self._restores.append(restore)
        else:
            raise TypeError(
                f"state should hold modules, optimizers, tensors, random number generators and objects with"
                f" state_dict() and load_state_dict(), got {type(value).__name__}"
            )

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


def saved(value: Any, into: Any = None) -> Callable[[], Any]:
    """Return a function that returns `value` as it is now: the same tensors and containers, with the same contents.

    With `into` it puts the items of a dict into that one.
    """
    if isinstance(value, Tensor):
        content = value.detach().clone()

        def restore() -> Tensor:
            with torch.inference_mode(value.is_inference()):
                value.detach().copy_(content)
            return value

        return restore
    if isinstance(value, dict):
        items = {key: saved(item) for key, item in value.items()}

        def refilled() -> Any:
            contents = {key: item() for key, item in items.items()}
            into.update(contents) if into is not None else refill(value, contents)
            return value

        return refilled
    if isinstance(value, list | set):
        parts = [saved(item) for item in value]
        return lambda: refill(value, [part() for part in parts])
    return lambda: value


def refill(value: Any, content: Any) -> Any:
    """Put these items into a dict, list or set in place of its own, and return it."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)
    return value


def restorer(value: Any) -> Restore | None:
    """Return a function that puts an object back as it is now; None where nobody can."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, type) or not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return None
    content = copy.deepcopy(value.state_dict())
    return lambda: value.load_state_dict(copy.deepcopy(content))


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
            if isinstance(value, nn.Module | Optimizer) or is_leaf or _has_state(value):
                state.append(value)
                seen |= {id(part): part for part in value.modules()} if isinstance(value, nn.Module) else {}
            else:
                ahead += _held(value)
    parameters = {id(x) for value in state if isinstance(value, nn.Module) for x in value.parameters()}
    for optimizer in instances_of(Optimizer):
        groups = getattr(optimizer, "param_groups", ())
        if id(optimizer) not in seen and any(
            id(x) in parameters for group in groups for x in group["params"]
        ):
            state.append(optimizer)
    return sorted(state, key=lambda value: not isinstance(value, nn.Module))


def _has_state(value: Any) -> bool:
    is_kept = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return is_kept or isinstance(value, torch.Generator | random.Random)


def _held(value: Any) -> Iterable[Any]:
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
        return [*map(_content, value.__closure__ or ()), *named, *(value.__defaults__ or ())]
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:
        return [wrapped]
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    is_programs = type(value).__module__ != "builtins" and not is_library(file)
    return list(getattr(value, "__dict__", {}).values()) if is_programs else []


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


class KeptAttributes:
    """Attributes of modules beside parameters and buffers, in which a run may leave something.

    `restore()` puts the same objects back with the same contents. `changed()` has the names of those that are not as
    they were.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept: dict[str, tuple[dict[str, Any], dict[str, Any], list[Restore], dict[str, str]]] = {}
        for root in modules:
            for path, module in each_module(root):
                space = vars(module)
                kept = {name: value for name, value in space.items() if name not in _MODULE_PARTS}
                restores = [restorer(value) or saved(value) for value in kept.values()]
                digests = {name: _digest(value) for name, value in kept.items()}
                self._kept.setdefault(path or type(root).__name__, (space, kept, restores, digests))

    def changed(self) -> list[str]:
        """Return the names of what is not as it was."""
        return [
            f"{path}.{name}"
            for path, (space, _, _, digests) in self._kept.items()
            for name, before in digests.items()
            if _digest(space.get(name)) != before
        ]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for space, kept, restores, _ in self._kept.values():
                for name in space.keys() - kept.keys() - _MODULE_PARTS:
                    del space[name]
                space.update(kept)
                for restore in restores:
                    restore()


def _digest(value: Any) -> str:
    """Return a text that differs where the tensors and numbers inside a value do."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    return "\n".join(f"{label} {_spell(leaf)}" for label, leaf in leaves(value, ""))


def _spell(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        try:
            return f"{fingerprint(leaf):016x}"
        except TypeError as error:  # sparse, nested, meta
            return str(error)
    return repr(leaf) if isinstance(leaf, bool | int | float | complex | str | bytes | None) else ""
