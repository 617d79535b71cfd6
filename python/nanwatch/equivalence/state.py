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


@contextmanager
def temporarily(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Set a value for the block, and after it the one from before."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


class State:
    """Snapshot of modules, optimizers, other stateful objects and all global random states.

    Modules: parameters, buffers, gradients, training flags. Optimizers: state and groups. Random number generators and
    tensors: their values. Anything else: its state_dict(). `restore()` puts it back, as often as is wanted.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self.modules: list[nn.Module] = []
        self._restores: list[Restore] = []
        self._tensors: dict[int, Tensor] = {}
        for one in objects:
            self._add(one)
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
            for one in self._restores:
                one()
        self._rng.restore()

    def storages(self) -> set[int]:
        """Return the keys of the storages that `restore` writes to."""
        return {x.untyped_storage()._cdata for x in self._tensors.values() if x.layout is torch.strided}

    def _add(self, one: object) -> None:
        if isinstance(one, nn.Module):
            self._add_module(one)
        elif isinstance(one, Optimizer):
            self._add_optimizer(one)
        elif isinstance(one, Tensor):
            self._add_tensor(one)
        else:
            restore = restorer(one)
            if restore is None:
                raise TypeError(
                    f"state should hold modules, optimizers, tensors, random number generators and objects with"
                    f" state_dict() and load_state_dict(), got {type(one).__name__}"
                )
            self._restores.append(restore)

    def _add_module(self, root: nn.Module) -> None:
        self.modules.append(root)
        for _, module in each_module(root):
            parameters, buffers = dict(module._parameters), dict(module._buffers)
            self._restores.append(functools.partial(_put_back, module, parameters, buffers, module.training))
            for x in (*parameters.values(), *buffers.values()):
                self._add_tensor(x)

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for x in group["params"]:
                self._add_tensor(x)
        state = {x: saved(value) for x, value in optimizer.state.items()}
        groups = [
            {key: saved(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups
        ]

        def restore() -> None:
            optimizer.state.clear()
            for x, value in state.items():
                optimizer.state[x] = value()
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                group.update({key: value() for key, value in values.items()})

        self._restores.append(restore)

    def _add_tensor(self, x: Tensor | None) -> None:
        if x is None or id(x) in self._tensors or nn.parameter.is_lazy(x):
            return
        self._tensors[id(x)] = x
        value, grad = saved(x), None if not x.is_leaf or x.grad is None else saved(x.grad)

        def restore() -> None:
            value()
            if x.is_leaf and (x.requires_grad or x.grad is not None):
                x.grad = None if grad is None else grad()

        self._restores.append(restore)


def _put_back(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any], training: bool) -> None:
    _refill(module._parameters, parameters)
    _refill(module._buffers, buffers)
    module.training = training


def saved(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value` as it is now: the same tensors and dicts, with the same contents."""
    if isinstance(value, Tensor):
        content = value.detach().clone()

        def restore() -> Tensor:
            with torch.inference_mode(value.is_inference()):
                value.detach().copy_(content)
            return value

        return restore
    if isinstance(value, dict):
        items = {key: saved(one) for key, one in value.items()}

        def refill() -> Any:
            _refill(value, {key: one() for key, one in items.items()})
            return value

        return refill
    if isinstance(value, list | set):
        return functools.partial(copy.deepcopy, copy.deepcopy(value))
    return lambda: value


def restorer(one: Any) -> Restore | None:
    """Return a function that puts an object back as it is now; None where nobody can."""
    if isinstance(one, torch.Generator):
        return functools.partial(one.set_state, one.get_state())
    if isinstance(one, random.Random):
        return functools.partial(one.setstate, one.getstate())
    if hasattr(one, "bit_generator"):
        return functools.partial(setattr, one.bit_generator, "state", copy.deepcopy(one.bit_generator.state))
    if type(one).__module__ == "numpy" and hasattr(one, "flags"):
        return functools.partial(one.__setitem__, ..., one.copy())
    if isinstance(one, type) or not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
        return None
    content = copy.deepcopy(one.state_dict())
    return lambda: one.load_state_dict(copy.deepcopy(content))


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
        ahead: list[tuple[str, Any]] = [("", step)]
        while ahead and len(self._seen) < _MOST_OBJECTS:
            name, one = ahead.pop()
            if id(one) in self._seen or isinstance(one, types.ModuleType | type | str | int | float | None):
                continue
            self._seen[id(one)] = one
            with suppressing("an object that a step refers to could not be entered"):
                ahead += self._enter(name, one)
        held = {id(x) for one in self.state if isinstance(one, nn.Module) for x in one.parameters()}
        for optimizer in instances_of(Optimizer):
            groups = getattr(optimizer, "param_groups", ())
            is_ours = any(id(x) in held for group in groups for x in group["params"])
            if is_ours and id(optimizer) not in self._seen:
                self.state.append(optimizer)
        self.state.sort(key=lambda one: not isinstance(one, nn.Module))

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
        if file is None or isinstance(one, threading.Thread) or not hasattr(one, "__dict__"):
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
            restore: Restore | None
            if isinstance(one, Tensor):
                restore = saved(one)
            elif isinstance(one, list | dict | set):  # its items have entries of their own
                restore = functools.partial(_refill, one, one.copy())
            else:
                restore = restorer(one)
            if restore is None:
                self._add_attributes(name, one)
            else:
                self._watch(name, functools.partial(lambda x: x, one))
                self._restores.append(restore)
        for root in reach.state:
            for path, module in each_module(root) if isinstance(root, nn.Module) else ():
                self._add_attributes(path or type(root).__name__, module)

    def _add_attributes(self, name: str, one: Any) -> None:
        known = _MODULE_PARTS if isinstance(one, nn.Module) else frozenset()
        own = {key: value for key, value in vars(one).items() if key not in known}
        for key in own:
            if not isinstance(own[key], nn.Module):
                self._watch(f"{name}.{key}", functools.partial(vars(one).get, key))
        self._restores.append(functools.partial(_reset, vars(one), own, known))

    def _watch(self, name: str, get: Callable[[], Any]) -> None:
        self._watched[name] = (get, digest(get()))

    def changed(self) -> list[str]:
        """Return the names of what is not as it was, and of the caches of functools that hold something."""
        now = {name: get() for name, (get, before) in self._watched.items() if digest(get()) != before}
        # A container with two names is one. Numbers are one object by chance.
        keys = {id(x) if isinstance(x, list | dict | set) else n: n for n, x in reversed(now.items())}
        filled = (one for one in _caches() if one.cache_info().currsize)
        return [*keys.values()][::-1] + [f"the cache of {one.__qualname__}" for one in filled]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for one in self._restores:
                one()

    def clear_caches(self) -> None:
        """Empty the caches of functools in the user's code."""
        for cached in _caches():
            cached.cache_clear()


def _reset(space: dict[str, Any], own: dict[str, Any], known: frozenset[str]) -> None:
    for key in [key for key in space if key not in own and key not in known]:
        del space[key]
    space.update(own)


def _refill(one: Any, content: Any) -> None:
    one.clear()
    (one.extend if isinstance(one, list) else one.update)(content)


def _caches() -> list[Any]:
    """Return the functions under functools.lru_cache that are neither PyTorch's nor another library's."""
    known = [
        (getattr(getattr(one, "__wrapped__", None), "__code__", None), one)
        for one in instances_of(functools._lru_cache_wrapper)
    ]
    return [one for code, one in known if code is not None and not is_library(code.co_filename)]


def digest(value: Any) -> str:
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
