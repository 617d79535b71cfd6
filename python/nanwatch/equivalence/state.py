"""Snapshot of all that a run changes and that PyTorch can put back, and the search for it from the run's function."""

from __future__ import annotations

import copy
import functools
import random
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
from ..util.suppressed import suppressed

# A step that refers to more objects than these is not searched to the end.
_MOST_OBJECTS = 20_000
_LIBRARIES = (
    "torch",
    "numpy",
    "nanwatch",
    "transformers",
    "builtins",
    "typing",
    "functools",
    "_pytest",
    "pytest",
)
_MODULE_PARTS = frozenset(vars(nn.Module()))

Restore = Callable[[], object]


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
            restore = _restore_of(one)
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
                if x is not None:
                    self._add_tensor(x)

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for x in group["params"]:
                self._add_tensor(x)
        state = {x: _saved(value) for x, value in optimizer.state.items()}
        groups = [
            {key: _saved(value) for key, value in g.items() if key != "params"}
            for g in optimizer.param_groups
        ]

        def restore() -> None:
            optimizer.state.clear()
            for x, value in state.items():
                optimizer.state[x] = value()
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                group.update({key: value() for key, value in values.items()})

        self._restores.append(restore)

    def _add_tensor(self, x: Tensor) -> None:
        if id(x) in self._tensors or nn.parameter.is_lazy(x):
            return
        self._tensors[id(x)] = x
        value, grad = _saved(x), None if not x.is_leaf or x.grad is None else _saved(x.grad)

        def restore() -> None:
            value()
            if x.is_leaf and (x.requires_grad or x.grad is not None):
                x.grad = None if grad is None else grad()

        self._restores.append(restore)


def _put_back(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any], training: bool) -> None:
    for target, saved in ((module._parameters, parameters), (module._buffers, buffers)):
        target.clear()
        target.update(saved)
    module.training = training


def _saved(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value` as it is now: the same tensors and dicts, with the same contents."""
    if isinstance(value, Tensor):
        content = value.detach().clone()

        def restore() -> Tensor:
            if value.is_inference():
                with torch.inference_mode():
                    return value.copy_(content)
            value.detach().copy_(content)
            return value

        return restore
    if isinstance(value, dict):
        contents: dict[Any, Any] = value
        items = {key: _saved(one) for key, one in contents.items()}

        def refill() -> dict[Any, Any]:
            contents.clear()
            contents.update({key: one() for key, one in items.items()})
            return contents

        return refill
    kept = copy.deepcopy(value) if isinstance(value, list | set) else value
    return lambda: copy.deepcopy(kept) if isinstance(kept, list | set) else kept


def _restore_of(one: Any) -> Restore | None:
    """Return a function that puts an object back as it is now; None where nobody can."""
    if isinstance(one, torch.Generator):
        return functools.partial(one.set_state, one.get_state())
    if isinstance(one, random.Random):
        return functools.partial(one.setstate, one.getstate())
    if hasattr(one, "bit_generator"):
        return functools.partial(setattr, one.bit_generator, "state", copy.deepcopy(one.bit_generator.state))
    if (
        not isinstance(one, type)
        and callable(getattr(one, "state_dict", None))
        and hasattr(one, "load_state_dict")
    ):
        saved = copy.deepcopy(one.state_dict())
        return lambda: one.load_state_dict(copy.deepcopy(saved))
    return None


class Reach:
    """Objects that a function refers to: closures, globals that it names, attributes of the object it is a method of.

    `state` is what PyTorch can put back: modules, the optimizers that hold their parameters, other objects with
    state_dict(), and leaf tensors that require a gradient. `rest` are the containers, generators, tensors and
    attributes beside them, by name, in which a run may leave something.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.state: list[Any] = []
        self.rest: dict[str, Any] = {}
        self._seen: set[int] = set()
        self._walk(step)
        held = {id(x) for one in self.state if isinstance(one, nn.Module) for x in one.parameters()}
        for optimizer in instances_of(Optimizer):
            groups = getattr(optimizer, "param_groups", ())
            if (
                any(id(x) in held for group in groups for x in group["params"])
                and id(optimizer) not in self._seen
            ):
                self._seen.add(id(optimizer))
                self.state.append(optimizer)
        self.state.sort(key=lambda one: not isinstance(one, nn.Module))

    def _walk(self, step: Any) -> None:
        ahead: list[tuple[str, Any]] = [("", step)]
        while ahead and len(self._seen) < _MOST_OBJECTS:
            name, one = ahead.pop()
            if id(one) in self._seen or isinstance(one, types.ModuleType | type | str | int | float | None):
                continue
            self._seen.add(id(one))
            ahead += self._enter(name, one)

    def _enter(self, name: str, one: Any) -> list[tuple[str, Any]]:
        if isinstance(one, nn.Module):
            self.state.append(one)
            found = []
            for path, module in each_module(one):
                self._seen.add(id(module))
                where = f"{name}.{path}" if path else name
                own = {key: value for key, value in vars(module).items() if key not in _MODULE_PARTS}
                found += [(f"{where}.{key}", value) for key, value in own.items()]
                if not type(module).__module__.startswith("torch."):
                    found.append((f"{where}.forward", type(module).forward))
            return found
        if isinstance(one, Optimizer) or (isinstance(one, Tensor) and one.requires_grad and one.is_leaf):
            self.state.append(one)
            return []
        if isinstance(one, Tensor | torch.Generator | random.Random) or hasattr(one, "bit_generator"):
            self.rest[name] = one
            return []
        if isinstance(one, list | tuple | set | dict):
            if not isinstance(one, tuple):
                self.rest[name] = one
            items = one.items() if isinstance(one, dict) else enumerate(one)
            return [(f"{name}[{key!r}]", value) for key, value in list(items)[:1000]]
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
        if type(one).__module__.partition(".")[0] in _LIBRARIES:
            return []
        if not hasattr(one, "__dict__"):
            return []
        self.rest[name] = one
        return [(f"{name}.{key}" if name else key, value) for key, value in vars(one).items()]


def _of_function(one: types.FunctionType) -> list[tuple[str, Any]]:
    if one.__module__ is not None and one.__module__.partition(".")[0] in _LIBRARIES:
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
    """What a run may leave in objects that State does not put back, such as a counter in a module or a list.

    `restore()` puts the contents back where they can be copied. `changed()` has the names of those that are not as they
    were.
    """

    def __init__(self, reach: Reach) -> None:
        memo: dict[int, Any] = {id(one): one for one in reach.state}
        for one in reach.state:
            if isinstance(one, nn.Module):
                memo |= {id(module): module for _, module in each_module(one)}
                memo |= {id(x): x for x in (*one.parameters(), *one.buffers())}
        self._restores: list[Restore] = []
        self._watched: dict[str, tuple[Callable[[], Any], str]] = {}
        for name, one in reach.rest.items():
            self._add(name, one, memo)
        for root in reach.state:
            for path, module in each_module(root) if isinstance(root, nn.Module) else ():
                self._add_attributes(path or type(root).__name__, module, memo)

    def _add(self, name: str, one: Any, memo: dict[int, Any]) -> None:
        if isinstance(one, Tensor):
            self._put(name, lambda: one, _saved(one))
        elif (restore := _restore_of(one)) is not None:
            self._put(name, lambda: one, restore)
        elif isinstance(one, list | dict | set):
            saved = _copied(one, memo)
            if saved is not None:
                self._put(name, lambda: one, functools.partial(_refill, one, saved, memo))
        else:
            self._add_attributes(name, one, memo)

    def _add_attributes(self, name: str, one: Any, memo: dict[int, Any]) -> None:
        known = _MODULE_PARTS if isinstance(one, nn.Module) else frozenset()
        for key, value in list(vars(one).items()):
            if key in known or isinstance(value, nn.Module | types.FunctionType | torch.Generator):
                continue
            saved = _copied([value], memo)
            if saved is not None:
                restore = functools.partial(_reset, one, key, value, saved, memo)
                self._put(f"{name}.{key}", functools.partial(vars(one).get, key), restore)

    def _put(self, name: str, get: Callable[[], Any], restore: Restore) -> None:
        self._watched[name] = (get, _digest(get()))
        self._restores.append(restore)

    def changed(self) -> list[str]:
        """Return the names of what is not as it was, and of the caches of functools that hold something."""
        found = [name for name, (get, digest) in self._watched.items() if _digest(get()) != digest]
        filled = [one for one in caches() if one.cache_info().currsize]
        return found + [f"the cache of {getattr(one, '__qualname__', one)}" for one in filled]

    def restore(self) -> None:
        """Put everything back, and empty the caches of functools in the user's code."""
        with torch.no_grad():
            for one in self._restores:
                one()
        for cached in caches():
            cached.cache_clear()


def caches() -> list[Any]:
    """Return the functions under functools.lru_cache that are neither PyTorch's nor another library's."""
    found = instances_of(functools._lru_cache_wrapper)
    return [
        one
        for one in found
        if hasattr(one, "__wrapped__")
        and "site-packages" not in (file := getattr(one.__wrapped__, "__code__", caches.__code__).co_filename)
        and not file.startswith(
            (str(random.__file__).rpartition("/")[0], __file__.rpartition("/equivalence/")[0])
        )
    ]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:  # an object that cannot be copied is left alone
        suppressed("an object of the step could not be copied")
        return None


def _reset(one: Any, key: str, value: Any, saved: list[Any], memo: dict[int, Any]) -> None:
    (content,) = _copied(saved, memo)
    if isinstance(value, Tensor) and not value.requires_grad:
        content = value.copy_(content)
    elif isinstance(value, list | dict | set):
        _refill(value, saved[0], memo)
        content = value
    vars(one)[key] = content


def _refill(one: Any, saved: Any, memo: dict[int, Any]) -> None:
    content = _copied(saved, memo)
    one.clear()
    (one.extend if isinstance(one, list) else one.update)(content)


def _digest(value: Any) -> str:
    """Return a text that differs where the tensors and numbers inside a value do."""
    if isinstance(value, torch.Generator):
        return str(fingerprint(value.get_state()))
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state)
    words = []
    for label, leaf in leaves(value, ""):
        if isinstance(leaf, Tensor):
            words.append(f"{label} {spell_bits(leaf)}")
        elif isinstance(leaf, bool | int | float | complex | str | bytes | type(None)):
            words.append(f"{label} {leaf!r}")
    return "\n".join(words)


def spell_bits(x: Tensor) -> str:
    """Return the fingerprint of a tensor as text, or why it has none."""
    try:
        return f"{fingerprint(x):016x}"
    except TypeError as error:
        return str(error)
