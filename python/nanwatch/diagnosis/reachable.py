"""Python state that a batch can change: which attributes, globals and closure variables its code reaches.

A batch runs the forwards and hooks of the model, and the training loop's loss and helpers. The names in their bytecode
tell what they can change: an attribute or a global that they assign, and a list, dict or generator that they name. So
the state of a model that keeps none is empty, and costs nothing at the start of each batch.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from types import (
    BuiltinMethodType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..util.modules import each_module
from ..util.program_code import frame_values, is_library, names_of
from .places import DEFAULTS, Root, attributes_of

# Functions of the program that are read, and values that are visited, so that a plan takes no longer than 0.1 s.
_MOST_FUNCTIONS, _MOST_VALUES = 2000, 20_000
_MOST_FRAMES = 32
# Elements of a container in which functions and objects are looked for.
_MOST_ELEMENTS = 64
# nn.Module's own attributes: `BatchSnapshot` holds buffers and training flags, and nobody else changes the others.
_OF_MODULES = frozenset(nn.Module().__dict__)
_GLOBAL_HOOKS = [
    getattr(torch_module, name)
    for name in vars(torch_module)
    if name.startswith("_global_") and name.endswith("_hooks")
]
_CONTAINERS = (list, dict, set, deque, bytearray, tuple)


@dataclass(slots=True)
class Plan:
    """Places to keep at the start of each batch, and the modules and objects that were found on the way.

    `objects` are strong references: let go of them when done.
    """

    roots: list[Root] = field(default_factory=list)
    draws: bool = False  # from the modules random or numpy.random
    objects: list[Any] = field(default_factory=list)


def plan_of(
    model: nn.Module, frame: FrameType | None = None, more: Iterable[Any] = (), *, strong: bool = False
) -> Plan:
    """Return where the code of the model's batch keeps state.

    frame: the innermost frame of the program; what it and its callers mention is followed too. more: further values.
    strong: the plan may keep objects alive, as one that is used at once.
    """
    search = _Search()
    for hooks in _GLOBAL_HOOKS:
        search.visit(hooks)
    for _, module in each_module(model):
        search.visit(module)
        for weight in module._parameters.values():
            if weight is not None:
                search.visit(weight._backward_hooks)
                search.visit(getattr(weight, "_post_accumulate_grad_hooks", None))
    for value in more:
        search.visit(value)
    for number, caller in enumerate(_users(frame)):
        if number == _MOST_FRAMES:
            break
        search.visit_frame(caller)
    search.follow()
    return search.plan(strong=strong)


def reached_by_other_threads() -> frozenset[int]:
    """Return the ids of the containers, locks and objects that threads beside this one can reach."""
    search, frames = _Search(), sys._current_frames()
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.name.startswith("nanwatch"):
            continue
        for value in list(vars(thread).values()):  # its target and arguments
            search.visit(value)
        frame = frames.get(thread.ident or 0)
        while frame is not None:
            if is_library(frame.f_code.co_filename):
                for value in frame_values(frame).values():
                    search.visit(value)
            else:
                search.visit_frame(frame)
            frame = frame.f_back
    search.follow()
    return frozenset(search.seen)


def _users(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@functools.lru_cache(4096)
def _own_functions(kind: Any) -> dict[str, Any]:
    """Return the attributes of a class that are no PyTorch's or Python's, the nearest base first."""
    found: dict[str, Any] = {}
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] not in (
            "torch",
            "builtins",
            "collections",
            "typing",
            "abc",
            "enum",
        ):
            for name, value in attributes_of(one).items():
                found.setdefault(name, value)
    return found


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class attribute: a method's, a property's."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
    if isinstance(value, functools.cached_property):
        parts = (value.func,)
    yield from (one for one in parts if isinstance(one, FunctionType))


@functools.lru_cache(4096)
def _is_users(kind: Any) -> bool:
    """Return whether instances hold state of the program: those of its own classes, and bags of attributes."""
    if kind in (SimpleNamespace, threading.local):
        return True
    if kind.__flags__ & (1 << 9) == 0:  # not a class that a class statement made
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not is_library(file)) or file is None


class _Search:
    """Search for what the code of a batch reaches."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self._objects: list[Any] = []
        self._classes: dict[Any, set[str]] = {}  # with the names that were read already
        self._assigned: dict[Any, set[str]] = {}  # attributes by the class whose methods assign them
        self._functions: list[FunctionType] = []
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._stored_globals: dict[int, set[str]] = {}
        self._mentioned: set[str] = set()
        self._stored: set[str] = set()
        self._draws = False
        self._visits = 0

    def visit(self, value: Any) -> None:
        """Take a value that the code reaches, and follow what it holds."""
        kind: Any = type(value)
        if value is None or kind in (int, float, str, bool, bytes) or isinstance(value, Tensor):
            return
        self._visits += 1
        if id(value) in self.seen or self._visits > _MOST_VALUES:
            return
        self.seen.add(id(value))
        if kind is FunctionType:
            self._visit_function(value)
        elif kind is MethodType or kind is BuiltinMethodType:
            self.visit(value.__self__)
            self.visit(getattr(value, "__func__", None))
        elif isinstance(value, functools.partial):
            for one in (value.func, value.args, value.keywords):
                self.visit(one)
        elif kind in _CONTAINERS or isinstance(value, dict):
            inner = dict.values(value) if isinstance(value, dict) else () if kind is bytearray else value
            for _, one in zip(range(_MOST_ELEMENTS), list(inner), strict=False):
                self.visit(one)
        elif isinstance(value, nn.Module):
            self._objects.append(value)
            self._classes.setdefault(kind, set())
            for _, module in each_module(value):
                self.visit(module)
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                self.visit(value.__dict__.get(name))
        elif isinstance(value, type):
            if _is_users(value):
                self._objects.append(value)
                self._classes.setdefault(value, set())
        elif isinstance(value, ModuleType):
            file = getattr(value, "__file__", None)
            if value.__name__ in ("random", "numpy.random"):
                self._draws = True
            elif file is not None and not is_library(file):
                self._globals.setdefault(id(value.__dict__), (value.__dict__, set()))
        elif _is_users(kind):
            self._objects.append(value)
            self._classes.setdefault(kind, set())

    def _visit_function(self, function: FunctionType) -> None:
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is not None:
            self.visit(wrapped)
        self._read(function.__code__, function.__globals__)
        if is_library(function.__code__.co_filename):
            return
        self._functions.append(function)
        self.visit(function.__defaults__)
        for cell in function.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:  # not bound yet
                continue

    def visit_frame(self, frame: FrameType) -> None:
        """Take a function of the program that is under way, with the functions and objects among its locals."""
        self._read(frame.f_code, frame.f_globals)
        if frame.f_code.co_flags & CO_OPTIMIZED:
            for value in frame_values(frame).values():
                self.visit(value)

    def _read(self, code: CodeType, namespace: dict[str, Any]) -> None:
        names = names_of(code)
        self._mentioned |= names.mentioned
        self._stored |= names.attributes
        if is_library(code.co_filename):
            return
        _, known = self._globals.setdefault(id(namespace), (namespace, set()))
        self._stored_globals.setdefault(id(namespace), set()).update(names.globals)
        for name in names.mentioned - known:
            known.add(name)
            self.visit(namespace.get(name))

    def follow(self) -> None:
        """Read the methods that the code mentions, until no new one is found."""
        num_read = -1
        while num_read != (num_read := len(self.seen)) and num_read < _MOST_VALUES:
            for kind, read in list(self._classes.items()):
                for name, value in _own_functions(kind).items():
                    is_called = name in self._mentioned or name == "forward" or name.startswith("__")
                    if name in read or not is_called or name in ("__init__", "__setstate__"):
                        continue
                    read.add(name)
                    for function in _functions_in(value):
                        self._assigned.setdefault(kind, set()).update(names_of(function.__code__).attributes)
                        if len(self._functions) < _MOST_FUNCTIONS:
                            self.visit(function)
            for value in list(self._objects):
                self._visit_attributes(value)
            for namespace, _ in list(self._globals.values()):
                for name in self._mentioned & namespace.keys():
                    self.visit(namespace[name])

    def _visit_attributes(self, value: Any) -> None:
        own = attributes_of(value)
        for name in self._mentioned & own.keys() - _OF_MODULES:
            self.visit(own[name])

    def plan(self, *, strong: bool) -> Plan:
        """Return the places where what was visited keeps state; with `strong` they keep it alive."""
        roots = []
        for value in self._objects:
            own = attributes_of(value)
            inherited = _own_functions(value if isinstance(value, type) else type(value))
            if isinstance(value, type):
                names = {name for name in self._stored & own.keys() if not callable(own[name])}
            else:
                names = {name for name in self._stored if name in own or _is_data(inherited.get(name, min))}
                # They may come only with the first call.
                names |= self._assigned.get(type(value), set()) - inherited.keys()
            mentioned = (self._mentioned & own.keys()) - _OF_MODULES
            names |= {name for name in mentioned if _holds_state(own[name])}
            names -= {name for name in names if isinstance(own.get(name), nn.Module)}
            # PyTorch's own modules do not choose by the values of their buffers.
            is_own = isinstance(value, nn.Module) and not type(value).__module__.startswith("torch.")
            buffers = [name for name in own["_buffers"] if name in self._mentioned] if is_own else []
            if names or buffers:
                try:
                    owner: Callable[[], Any] = weakref.ref(value)
                except TypeError:  # a SimpleNamespace, or a class with slots
                    if not strong:
                        continue
                    owner = functools.partial(_itself, value)
                roots += [Root(owner, name) for name in sorted(names - _OF_MODULES)]
                roots += [Root(owner, name, is_buffer=True) for name in buffers]
        if "environ" in self._mentioned:
            roots.append(Root(vars(os), "environ"))
        for number, (namespace, known) in self._globals.items():
            stored = self._stored_globals.get(number, set())
            known = known | (self._mentioned & namespace.keys())
            roots += [
                Root(namespace, name)
                for name in sorted(known | stored)
                if not name.startswith("__")
                and (_holds_state(namespace.get(name)) or (name in stored and is_plain(namespace.get(name))))
            ]
        for function in self._functions:
            roots += [Root(weakref.ref(function), i) for i in range(len(function.__closure__ or ()))]
            if any(map(_holds_state, function.__defaults__ or ())):
                roots.append(Root(weakref.ref(function), DEFAULTS))
        roots = [
            root
            for root in roots
            if type(root.name) is str or _holds_state(root.get()) or not callable(root.get())
        ]
        return Plan(roots, self._draws, self._objects)


def _itself(value: Any) -> Any:
    return value


def _holds_state(value: Any) -> bool:
    """Return whether a value can change in its place: a container, an array, an iterator, a generator, a lock."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None), FunctionType, ModuleType, MethodType, type, tuple, bytes):
        return False
    if isinstance(value, nn.Module | type):
        return False
    return (
        isinstance(value, (*_CONTAINERS, Tensor, ContextVar))
        or hasattr(kind, "__next__")
        or kind.__module__ in _STATEFUL
        or kind.__module__ in OF_ATTRIBUTES
    )


# Modules of Python whose classes hold their state in attributes: Condition, WeakKeyDictionary, UserDict, Namespace.
OF_ATTRIBUTES = frozenset({"threading", "weakref", "collections", "argparse"})
# Modules of the classes that `kept_values` knows, and of those whose values cannot be had a second time.
_STATEFUL = frozenset({
    "_thread", "random", "numpy", "numpy.random._generator", "numpy.random.mtrand", "torch", "torch._C",
    "queue", "_queue", "multiprocessing.queues", "multiprocessing.connection", "socket", "_io", "_csv", "itertools",
    "sqlite3", "multiprocessing.sharedctypes", "multiprocessing.shared_memory",
})  # fmt: skip


def _is_data(value: Any) -> bool:
    """Return whether a class attribute is a default of an instance's, not a method."""
    return is_plain(value) or type(value) in _CONTAINERS


def is_plain(value: Any) -> bool:
    """Return whether the value is a number, text, None or a tuple, which cannot change in its place."""
    return value is None or type(value) in (int, float, complex, str, bool, bytes, tuple)
