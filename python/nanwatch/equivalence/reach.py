"""Objects that a function refers to, and the search of them for what a run may leave behind."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..diagnosis.provenance import SKIPPED_FILES
from ..numerics._extension import instances_of
from ..numerics.ranges import fingerprint
from ..recording.walk import leaves
from ..util.modules import each_module
from ..util.visible import suppressing
from .state import Restore, restorer, saved

# A step that refers to more objects than these is not searched to the end.
_MOST_OBJECTS = 20_000
_MOST_ITEMS = 1000
# Objects of these are not entered: what they hold is not the program's.
_TORCH = (*SKIPPED_FILES, os.path.dirname(str(numpy.__file__)))
_PYTHON = os.path.dirname(os.__file__) + os.sep
_MODULE_PARTS = frozenset(vars(nn.Module()))


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
        self._walk(step)
        held = {id(x) for one in self.state if isinstance(one, nn.Module) for x in one.parameters()}
        for optimizer in instances_of(Optimizer):
            groups = getattr(optimizer, "param_groups", ())
            if (
                any(id(x) in held for group in groups for x in group["params"])
                and id(optimizer) not in self._seen
            ):
                self._seen[id(optimizer)] = optimizer
                self.state.append(optimizer)
        self.state.sort(key=lambda one: not isinstance(one, nn.Module))

    def _walk(self, step: Any) -> None:
        ahead: list[tuple[str, Any]] = [("", step)]
        while ahead and len(self._seen) < _MOST_OBJECTS:
            name, one = ahead.pop()
            if id(one) in self._seen or isinstance(one, types.ModuleType | type | str | int | float | None):
                continue
            self._seen[id(one)] = one
            with suppressing("an object that a step refers to could not be entered"):
                ahead += self._enter(name, one)

    def _keep(self, name: str, one: Any) -> None:
        self.rest[name if name not in self.rest else f"{name} ({len(self.rest)})"] = one

    def _enter(self, name: str, one: Any) -> list[tuple[str, Any]]:
        if isinstance(one, nn.Module):
            self.state.append(one)
            found = []
            for path, module in each_module(one):
                self._seen[id(module)] = module
                where = f"{name}.{path}" if path else name
                own = {key: value for key, value in vars(module).items() if key not in _MODULE_PARTS}
                found += [(f"{where}.{key}", value) for key, value in own.items()]
                hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
                found += [(f"{where}.hook", hook) for one in hooks for hook in one.values()]
                if not type(module).__module__.startswith("torch."):
                    found.append((f"{where}.forward", type(module).forward))
            return found
        if isinstance(one, Optimizer) or (isinstance(one, Tensor) and one.requires_grad and one.is_leaf):
            self.state.append(one)
            return []
        if isinstance(one, Tensor | torch.Generator | random.Random) or _is_of_numpy(one):
            self._keep(name, one)
            return []
        if isinstance(one, list | tuple | set | dict):
            if not isinstance(one, tuple):
                self._keep(name, one)
            items = one.items() if isinstance(one, dict) else enumerate(one)
            return [(f"{name}[{key!r}]", value) for key, value in list(items)[:_MOST_ITEMS]]
        if isinstance(one, functools.partial):
            return [(name, one.func), (name, one.args), (name, one.keywords)]
        if isinstance(one, types.MethodType):
            return [(name, one.__func__), ("self", one.__self__)]
        if isinstance(one, types.FunctionType):
            return _of_function(one)
        if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
            self.state.append(one)
            return []
        wrapped = getattr(one, "__wrapped__", None)
        if wrapped is not None:
            return [(name, wrapped)]
        file = _file_of(type(one))
        if file is None or isinstance(one, threading.Thread):
            return []
        if not hasattr(one, "__dict__"):
            return []
        if not _is_installed(file):  # a library's own state may be that of a thread or a file
            self._keep(name, one)
        return [(f"{name}.{key}" if name else key, value) for key, value in vars(one).items()]


def _file_of(one: Any) -> str | None:
    """Return the file of a class or function, "" where it has none, or None for PyTorch's, Python's and nanwatch's."""
    name = getattr(one, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_pythons = name in sys.builtin_module_names or (file.startswith(_PYTHON) and not _is_installed(file))
    return None if is_pythons or file.startswith(_TORCH) else file


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def _is_of_numpy(one: Any) -> bool:
    return hasattr(one, "bit_generator") or (type(one).__module__ == "numpy" and hasattr(one, "flags"))


def _of_function(one: types.FunctionType) -> list[tuple[str, Any]]:
    if _file_of(one) is None:
        return []
    found: list[tuple[str, Any]] = []
    for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # a variable that has no value yet
            continue
    codes = [one.__code__]
    while codes:
        code = codes.pop()
        found += [(name, one.__globals__[name]) for name in code.co_names if name in one.__globals__]
        codes += [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return found + [("", value) for value in (one.__defaults__ or ())]


class Leftovers:
    """The state that a run may leave in objects that State does not put back, such as a counter in a module or a list.

    `restore()` puts the same objects back with the same contents. `changed()` has the names of those that are not as
    they were.
    """

    def __init__(self, reach: Reach) -> None:
        self._restores: list[Restore] = []
        self._watched: dict[str, tuple[Callable[[], Any], str]] = {}
        for name, one in reach.rest.items():
            if isinstance(one, Tensor):
                self._put(name, functools.partial(_itself, one), saved(one))
            elif (restore := restorer(one)) is not None:
                self._put(name, functools.partial(_itself, one), restore)
            elif isinstance(one, list | dict | set):
                # Its items have entries of their own.
                self._put(name, functools.partial(_itself, one), functools.partial(_refill, one, one.copy()))
            else:
                self._add_attributes(name, one)
        for root in reach.state:
            for path, module in each_module(root) if isinstance(root, nn.Module) else ():
                self._add_attributes(path or type(root).__name__, module)

    def _add_attributes(self, name: str, one: Any) -> None:
        known = _MODULE_PARTS if isinstance(one, nn.Module) else frozenset()
        own = {key: value for key, value in vars(one).items() if key not in known}
        for key in own:
            if not isinstance(own[key], nn.Module):
                get = functools.partial(vars(one).get, key)
                self._watched[f"{name}.{key}"] = (get, _digest(get()))
        self._restores.append(functools.partial(_reset, vars(one), own, known))

    def _put(self, name: str, get: Callable[[], Any], restore: Restore) -> None:
        self._watched[name] = (get, _digest(get()))
        self._restores.append(restore)

    def changed(self) -> list[str]:
        """Return the names of what is not as it was, and of the caches of functools that hold something."""
        found = [name for name, (get, digest) in self._watched.items() if _digest(get()) != digest]
        filled = [one for one in _caches() if one.cache_info().currsize]
        return found + [f"the cache of {getattr(one, '__qualname__', one)}" for one in filled]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for one in self._restores:
                one()

    def clear_caches(self) -> None:
        """Empty the caches of functools in the user's code."""
        for cached in _caches():
            cached.cache_clear()


def _itself(one: Any) -> Any:
    return one


def _reset(space: dict[str, Any], own: dict[str, Any], known: frozenset[str]) -> None:
    for key in [key for key in space if key not in own and key not in known]:
        del space[key]
    space.update(own)


def _refill(one: Any, content: Any) -> None:
    one.clear()
    (one.extend if isinstance(one, list) else one.update)(content)


def _caches() -> list[Any]:
    """Return the functions under functools.lru_cache that are neither PyTorch's nor another library's."""
    found = [one for one in instances_of(functools._lru_cache_wrapper) if hasattr(one, "__wrapped__")]
    files = [getattr(getattr(one.__wrapped__, "__code__", None), "co_filename", _PYTHON) for one in found]
    library = (*_TORCH, _PYTHON)
    return [
        one
        for one, file in zip(found, files, strict=True)
        if not file.startswith(library) and not _is_installed(file)
    ]


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
