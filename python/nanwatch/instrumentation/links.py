"""The place before a module's call, where watches and re-runs stand; modules themselves stay as they are.

`nn.Module.__call__` asks its module for `_compiled_call_impl` before it runs hooks and forward. From the first use on a
data descriptor has that name in the class `nn.Module`. It answers with the link that stands before the module's call,
or with what `module.compile()` has put into the module's `__dict__`, or with None, as PyTorch's own class attribute.
The links are kept beside the modules, by their addresses: an entry in a module's `__dict__` would reach every copy,
`vars(module)`, and the pickles of all classes whose `__getstate__` copies `__dict__`, as nn.LSTM's does.

A link lives until it is detached or its module is freed. What it refers to must not keep that module alive: the garbage
collector sees no cycle here.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
import weakref
from abc import ABC
from collections.abc import Callable
from typing import Any

from torch import nn

from ..numerics import _extension

ATTRIBUTE = "_compiled_call_impl"


class Link(ABC):
    """A callable before a module's call. `inner` is the next one: a link, what `module.compile()` made, or None."""

    inner: Any
    recorder: Any = None


class _PythonPlace:
    """As csrc/recorder/place.cpp, where there is no compiled part."""

    def __init__(self) -> None:
        self.everyone: Callable[..., Any] | None = None
        # Bound methods: where a link itself is called, Python 3.11 counts two more of the recursion limit.
        self._calls: dict[int, Any] = {}
        # The function that asks for it, and the place in it of the first time.
        self._asking = code = nn.Module._wrapped_call_impl.__code__
        offsets = (one.offset for one in dis.get_instructions(code) if one.argval == ATTRIBUTE)
        self._first = next(offsets, sys.maxsize)

    def _get(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return None
        call = self._calls.get(id(module))
        if call is None:
            call = module.__dict__.get(ATTRIBUTE)
        if call is None and self.everyone is not None:
            return self.everyone.__get__(module)
        if call is None:
            # nn.Module.__call__ asks twice. A link that another thread takes away in between was there before.
            caller = sys._getframe(1)
            if caller.f_code is self._asking and caller.f_lasti > self._first:
                return module._call_impl
        return call

    # Not a function: Dynamo follows those, and takes what others return as it is.
    __get__ = functools.partial(_get)

    def find(self, address: int, /) -> Any:
        """The callable before the call of the module at an address, or None."""
        return getattr(self._calls.get(address), "__self__", None)

    def put(self, address: int, call: Any, /) -> None:
        """Put a callable before the call of the module at an address."""
        self._calls[address] = call.__call__

    def take(self, address: int, /) -> None:
        """Take away what stands before the call of the module at an address."""
        self._calls.pop(address, None)


# Whether modules answer with bound methods of links, in place of the links.
HOLDS_METHODS = _extension.C is None
_Place: Any = _PythonPlace if _extension.C is None else _extension.C.Place


class _Descriptor(_Place):  # type: ignore[misc]
    """The data descriptor; what is set goes where it goes without it."""

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[ATTRIBUTE] = value
        self._set_last(module, value)

    def __delete__(self, module: nn.Module) -> None:
        if ATTRIBUTE not in module.__dict__:
            raise AttributeError(ATTRIBUTE)
        del module.__dict__[ATTRIBUTE]
        self._set_last(module, None)

    def _set_last(self, module: nn.Module, value: Any) -> None:
        with _lock:
            if links := chain(module):
                links[-1].inner = value


_place = _Descriptor()
# Reentrant: the garbage collector may free a module, and call _forget, anywhere in here.
_lock = threading.RLock()
_alive: dict[int, weakref.ref[nn.Module]] = {}  # those that a link stands before


def _install() -> None:
    """Put the descriptor into nn.Module, for good: each change of a class makes the interpreter forget its lookups."""
    if nn.Module.__dict__[ATTRIBUTE] is not _place:
        nn.Module._compiled_call_impl = _place


def make_calls_of_others(function: Callable[..., Any] | None) -> None:
    """Let `function(module, ...)` make the calls of all modules that nothing stands before; None ends it."""
    _install()
    _place.everyone = function


def calls_of_others() -> Callable[..., Any] | None:
    """The function that makes them now."""
    found: Callable[..., Any] | None = _place.everyone
    return found


def chain(module: nn.Module) -> list[Any]:
    """The links before the module's call, the outermost first."""
    found = []
    current = _place.find(id(module))
    while isinstance(current, Link):
        found.append(current)
        current = current.inner
    return found


def own_call(module: nn.Module) -> Callable[..., Any]:
    """The function that makes the module's call where nothing stands before it."""
    own: Callable[..., Any] | None = module.__dict__.get(ATTRIBUTE)
    return module._call_impl if own is None else own


def attach(module: nn.Module, link: Any) -> None:
    """Put the link before the module's call, and before all links there."""
    key = id(module)
    with _lock:
        before = _place.find(key)
        link.inner = module.__dict__.get(ATTRIBUTE) if before is None else before
        if before is None:
            _install()
            _alive[key] = weakref.ref(module, functools.partial(_forget, key))
        _place.put(key, link)


def detach(module: nn.Module, link: Any) -> None:
    """Take the link away, also from behind others. Does nothing where it does not stand."""
    key = id(module)
    with _lock:
        links = chain(module)
        for outer, one in zip([None, *links], links, strict=False):
            if one is not link:
                continue
            if outer is not None:
                outer.inner = link.inner
            elif isinstance(link.inner, Link):
                _place.put(key, link.inner)
            else:
                _alive.pop(key, None)
                _place.take(key)


def _forget(key: int, _: object) -> None:
    _alive.pop(key, None)
    _place.take(key)
