"""State that a run changes: what PyTorch can put back, and what a function leaves in the objects that it refers to."""

from __future__ import annotations

import copy
import functools
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from ..instrumentation.execution_context import RngState
from ..numerics._extension import instances_of
from ..numerics.ranges import fingerprint
from ..recording.walk import leaves
from ..util.modules import each_module
from ..util.program_code import SKIPPED_FILES, is_library
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
    """Return a function that returns `value` as it is now: the same tensors and dicts, with the same contents.

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
            if into is not None:
                into.update(contents)
            else:
                refill(value, contents)
            return value

        return refilled
    if isinstance(value, list | set):
        return functools.partial(copy.deepcopy, copy.deepcopy(value))
    return lambda: value


def refill(value: Any, content: Any) -> None:
    """Put these items into a dict, list or set in place of its own."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)


def restorer(value: Any) -> Restore | None:
    """Return a function that puts an object back as it is now; None where nobody can."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if hasattr(value, "bit_generator"):
        generator = value.bit_generator
        return functools.partial(setattr, generator, "state", copy.deepcopy(generator.state))
    if _is_of_numpy(value):
        return functools.partial(value.__setitem__, ..., value.copy())
    if isinstance(value, type) or not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return None
    content = copy.deepcopy(value.state_dict())
    return lambda: value.load_state_dict(copy.deepcopy(content))


# A step that refers to more objects than these is not searched to the end.
_MOST_OBJECTS = 20_000
_MOST_ITEMS = 1000
# Objects of these are not entered: what they hold is not the program's.
_TORCH = (*SKIPPED_FILES, os.path.dirname(str(numpy.__file__)))
_PYTHON = os.path.dirname(os.__file__) + os.sep


class Reach:
    """Objects that a function refers to: closures, globals that it names, attributes of the object it is a method of.

    `state` is what PyTorch can put back: modules, the optimizers that hold their parameters, other objects with
    state_dict(), and leaf tensors that require a gradient. `rest` are the containers, generators, tensors and
    attributes beside them, by name, in which a run may leave something.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.state: list[Any] = []
        self.rest: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}  # with the objects, so that no other one gets their ids
        ahead: list[tuple[str, Any]] = [("", step)]
        while ahead and len(self._seen) < _MOST_OBJECTS:
            name, value = ahead.pop()
            if id(value) in self._seen or isinstance(
                value, types.ModuleType | type | str | int | float | None
            ):
                continue
            self._seen[id(value)] = value
            with suppressing("an object that a step refers to could not be entered"):
                ahead += self._enter(name, value)
        held = {id(x) for value in self.state if isinstance(value, nn.Module) for x in value.parameters()}
        for optimizer in instances_of(Optimizer):
            groups = getattr(optimizer, "param_groups", ())
            is_ours = any(id(x) in held for group in groups for x in group["params"])
            if is_ours and id(optimizer) not in self._seen:
                self.state.append(optimizer)
        self.state.sort(key=lambda value: not isinstance(value, nn.Module))

    def keep(self, name: str, value: Any) -> None:
        """Add an object in which a run may leave something."""
        self.rest[name if name not in self.rest else f"{name} ({len(self.rest)})"] = value

    def _enter(self, name: str, value: Any) -> list[tuple[str, Any]]:
        if isinstance(value, nn.Module):
            self.state.append(value)
            return [item for path, module in each_module(value) for item in self._parts(name, path, module)]
        is_leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
        if isinstance(value, Optimizer) or is_leaf:
            self.state.append(value)
            return []
        if isinstance(value, Tensor | torch.Generator | random.Random) or _is_of_numpy(value):
            self.keep(name, value)
            return []
        if isinstance(value, list | tuple | set | dict):
            if not isinstance(value, tuple):
                self.keep(name, value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return [(f"{name}[{key!r}]", item) for key, item in list(items)[:_MOST_ITEMS]]
        if isinstance(value, functools.partial):
            return [(name, value.func), (name, value.args), (name, value.keywords)]
        if isinstance(value, types.MethodType):
            return [(name, value.__func__), ("self", value.__self__)]
        if isinstance(value, types.FunctionType):
            return _of_function(value)
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self.state.append(value)
            return []
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            return [(name, wrapped)]
        file = _file_of(type(value))
        if file is None or isinstance(value, threading.Thread) or not hasattr(value, "__dict__"):
            return []
        if not _is_installed(file):  # a library's own state may be that of a thread or a file
            self.keep(name, value)
        return [(f"{name}.{key}" if name else key, item) for key, item in vars(value).items()]

    def _parts(self, name: str, path: str, module: nn.Module) -> list[tuple[str, Any]]:
        self._seen[id(module)] = module
        where = f"{name}.{path}" if path else name
        parts = [(f"{where}.{key}", item) for key, item in vars(module).items() if key not in _MODULE_PARTS]
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
        parts += [(f"{where}.hook", hook) for kind in hooks for hook in kind.values()]
        is_torchs = type(module).__module__.startswith("torch.")
        return parts if is_torchs else [*parts, (f"{where}.forward", type(module).forward)]


def _file_of(value: Any) -> str | None:
    """Return the file of a class or function, "" where it has none, or None for PyTorch's, Python's and nanwatch's."""
    name = getattr(value, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_pythons = name in sys.builtin_module_names or (file.startswith(_PYTHON) and not _is_installed(file))
    return None if is_pythons or file.startswith(_TORCH) else file


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def _is_of_numpy(value: Any) -> bool:
    return hasattr(value, "bit_generator") or (type(value).__module__ == "numpy" and hasattr(value, "flags"))


def _of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    if _file_of(function) is None:
        return []
    values: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppressing("a variable of a step has no value yet"):
            values.append((name, cell.cell_contents))
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names = (name for name in code.co_names if name in function.__globals__)
        values += [(name, function.__globals__[name]) for name in names]
        codes += [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return values + [("", value) for value in (function.__defaults__ or ())]


class Leftovers:
    """The state that a run may leave in objects that Snapshot does not put back, such as a counter or a list.

    `restore()` puts the same objects back with the same contents. `changed()` has the names of those that are not as
    they were.
    """

    def __init__(self, reach: Reach) -> None:
        self._restores: list[Restore] = []
        self._watched: dict[str, tuple[Callable[[], Any], str]] = {}
        for name, value in reach.rest.items():
            restore: Restore | None
            if isinstance(value, Tensor):
                restore = saved(value)
            elif isinstance(value, list | dict | set):  # its items have entries of their own
                restore = functools.partial(refill, value, value.copy())
            else:
                restore = restorer(value)
            if restore is None:
                self._add_attributes(name, value)
            else:
                self._watch(name, functools.partial(lambda x: x, value))
                self._restores.append(restore)
        for root in reach.state:
            for path, module in each_module(root) if isinstance(root, nn.Module) else ():
                self._add_attributes(path or type(root).__name__, module)

    def _add_attributes(self, name: str, value: Any) -> None:
        known = _MODULE_PARTS if isinstance(value, nn.Module) else frozenset()
        attributes = {key: item for key, item in vars(value).items() if key not in known}
        for key, item in attributes.items():
            if not isinstance(item, nn.Module):
                self._watch(f"{name}.{key}", functools.partial(vars(value).get, key))
        self._restores.append(functools.partial(_reset, vars(value), attributes, known))

    def _watch(self, name: str, get: Callable[[], Any]) -> None:
        self._watched[name] = (get, _digest(get()))

    def changed(self) -> list[str]:
        """Return the names of what is not as it was, and of the caches of functools that hold something."""
        now = {name: get() for name, (get, before) in self._watched.items() if _digest(get()) != before}
        # A tensor or container with two names is one. Numbers are one object by chance.
        keys = {
            id(x) if isinstance(x, list | dict | set | Tensor) else n: n for n, x in reversed(now.items())
        }
        filled = (cached for cached in _caches() if cached.cache_info().currsize)
        return [*keys.values()][::-1] + [f"the cache of {cached.__qualname__}" for cached in filled]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for restore in self._restores:
                restore()

    def clear_caches(self) -> None:
        """Empty the caches of functools in the user's code."""
        for cached in _caches():
            cached.cache_clear()


def _reset(space: dict[str, Any], attributes: dict[str, Any], known: frozenset[str]) -> None:
    for key in [key for key in space if key not in attributes and key not in known]:
        del space[key]
    space.update(attributes)


def _caches() -> list[Any]:
    """Return the functions under functools.lru_cache that are neither PyTorch's nor another library's."""
    known = [
        (getattr(getattr(cached, "__wrapped__", None), "__code__", None), cached)
        for cached in instances_of(functools._lru_cache_wrapper)
    ]
    return [cached for code, cached in known if code is not None and not is_library(code.co_filename)]


def _digest(value: Any) -> str:
    """Return a text that differs where the tensors and numbers inside a value do."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    elif isinstance(value, random.Random):
        return str(hash(value.getstate()))
    elif hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state)
    elif _is_of_numpy(value):
        return str(value.tobytes())
    return "\n".join(f"{label} {_spell(leaf)}" for label, leaf in leaves(value, ""))


def _spell(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        try:
            return f"{fingerprint(leaf):016x}"
        except TypeError as error:  # sparse, nested, meta
            return str(error)
    return repr(leaf) if isinstance(leaf, bool | int | float | complex | str | bytes | None) else ""
