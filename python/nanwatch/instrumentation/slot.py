"""The slot before a module's call, to which watches and re-runs attach wrappers; modules themselves stay as they are.

`nn.Module.__call__` asks its module for `_compiled_call_impl` before it runs hooks and forward. From the first use on a
data descriptor has that name in the class `nn.Module`. It answers with the outermost wrapper of the module's call, or
with what `module.compile()` has put into the module's `__dict__`, or with None, as PyTorch's own class attribute.
Wrappers are kept beside the modules, by their addresses: an entry in a module's `__dict__` would reach every copy,
`vars(module)`, and the pickles of all classes whose `__getstate__` copies `__dict__`, as nn.LSTM's does.

A wrapper lives until it is detached or its module is freed. It must not refer to that module strongly: the garbage
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


class CallWrapper(ABC):
    """A callable before a module's call. `inner` is the next: a wrapper, what `module.compile()` made, or None."""

    inner: Any
    recorder: Any = None


class _PythonCallSlot:
    """The pure-Python twin of csrc/recorder/call_slot.cpp."""

    def __init__(self) -> None:
        self.default_call: Callable[..., Any] | None = None
        # Bound methods: where a wrapper itself is called, Python 3.11 counts two more of the recursion limit.
        self._calls: dict[int, Any] = {}
        # The function that asks for it, and the offset in its code of the first time.
        self._asking = code = nn.Module._wrapped_call_impl.__code__
        offsets = (one.offset for one in dis.get_instructions(code) if one.argval == ATTRIBUTE)
        self._first = next(offsets, sys.maxsize)

    def _get(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return None
        call = self._calls.get(id(module))
        if call is None:
            call = module.__dict__.get(ATTRIBUTE)
        if call is None and self.default_call is not None:
            return self.default_call.__get__(module)
        if call is None:
            # nn.Module.__call__ asks twice. A wrapper that another thread detaches in between was there before.
            caller = sys._getframe(1)
            if caller.f_code is self._asking and caller.f_lasti > self._first:
                return module._call_impl
        return call

    # Not a function: Dynamo follows those, and takes what others return as it is.
    __get__ = functools.partial(_get)

    def find(self, address: int, /) -> Any:
        """Return the callable before the call of the module at an address, or None."""
        return getattr(self._calls.get(address), "__self__", None)

    def set(self, address: int, call: Any, /) -> None:
        """Put a callable before the call of the module at an address."""
        self._calls[address] = call.__call__

    def clear(self, address: int, /) -> None:
        """Remove the callable before the call of the module at an address."""
        self._calls.pop(address, None)


# Whether modules answer with bound methods of wrappers, in place of the wrappers.
HOLDS_METHODS = _extension.C is None
_CallSlot: Any = _PythonCallSlot if _extension.C is None else _extension.C.CallSlot


class _Descriptor(_CallSlot):  # type: ignore[misc]
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
            if found := wrappers(module):
                found[-1].inner = value


_slot = _Descriptor()
# Reentrant: the garbage collector may free a module, and call _forget, anywhere in here.
_lock = threading.RLock()
_alive: dict[int, weakref.ref[nn.Module]] = {}  # those with a wrapper


def _install() -> None:
    """Put the descriptor into nn.Module, for good: each change of a class makes the interpreter forget its lookups."""
    if nn.Module.__dict__[ATTRIBUTE] is not _slot:
        nn.Module._compiled_call_impl = _slot


def set_default_call(function: Callable[..., Any] | None) -> None:
    """Let `function(module, ...)` make the calls of all modules without a wrapper; None ends it."""
    _install()
    _slot.default_call = function


def default_call() -> Callable[..., Any] | None:
    """Return the function that makes them now."""
    found: Callable[..., Any] | None = _slot.default_call
    return found


def wrappers(module: nn.Module) -> list[Any]:
    """Return the wrappers of the module's call, the outermost first."""
    found = []
    current = _slot.find(id(module))
    while isinstance(current, CallWrapper):
        found.append(current)
        current = current.inner
    return found


def own_call(module: nn.Module) -> Callable[..., Any]:
    """Return the function that makes the module's call where no wrapper is attached."""
    own: Callable[..., Any] | None = module.__dict__.get(ATTRIBUTE)
    return module._call_impl if own is None else own


def attach(module: nn.Module, wrapper: Any) -> None:
    """Attach the wrapper to the module's slot, outside all wrappers there."""
    key = id(module)
    with _lock:
        before = _slot.find(key)
        wrapper.inner = module.__dict__.get(ATTRIBUTE) if before is None else before
        if before is None:
            _install()
            _alive[key] = weakref.ref(module, functools.partial(_forget, key))
        _slot.set(key, wrapper)


def detach(module: nn.Module, wrapper: Any) -> None:
    """Detach the wrapper, also from inside others. Do nothing where it is not attached."""
    key = id(module)
    with _lock:
        found = wrappers(module)
        for outer, one in zip([None, *found], found, strict=False):
            if one is not wrapper:
                continue
            if outer is not None:
                outer.inner = wrapper.inner
            elif isinstance(wrapper.inner, CallWrapper):
                _slot.set(key, wrapper.inner)
            else:
                _alive.pop(key, None)
                _slot.clear(key)


def _forget(key: int, _: object) -> None:
    _alive.pop(key, None)
    _slot.clear(key)
