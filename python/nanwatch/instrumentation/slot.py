"""The slot before a module's call, where watches and re-runs attach wrappers without a change to the module.

`nn.Module.__call__` asks its module for `_compiled_call_impl` before it runs hooks and forward. From the first use on a
data descriptor has that name in the class `nn.Module`. It answers with the outermost wrapper of the module's call, or
with what `module.compile()` has put into the module's `__dict__`, or with None, as PyTorch's own class attribute.
Wrappers are kept beside the modules, by their addresses: an entry in a module's `__dict__` would reach every copy,
`vars(module)`, and the pickles of all classes whose `__getstate__` copies `__dict__`, as nn.LSTM's does.

Compiled code knows a module by its site, a tensor that holds the module's address and is an input of the graph. Two
more descriptors of the compiled part give torch.compile the site, and say whether the module is watched. A module gets
a site when a compiled call of it looks for a watch, and keeps it, so that the graph serves the next watch.

A wrapper lives until it is detached or its module is freed. It must not refer to that module strongly: the garbage
collector sees no cycle here. A temporary wrapper, which a `with` block detaches, may.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import ABC
from collections.abc import Callable
from typing import Any

from torch import nn

from ..numerics import _extension
from .global_hooks import children, is_inside

ATTRIBUTE = "_compiled_call_impl"
SITE = "_nanwatch_site"
IS_WATCHED = "_nanwatch_is_watched"


class CallWrapper(ABC):
    """Callable before a module's call. `inner` is the next: a wrapper, the result of `module.compile()`, or None."""

    inner: Any
    recorder: Any = None


class _PythonCallSlot:
    """The slot without the compiled part, which knows no sites: compiled code is not watched then."""

    def __init__(self) -> None:
        self.default_call: Callable[..., Any] | None = None
        # Bound methods, because Python 3.11 counts two more calls of the recursion limit for a callable object.
        self._calls: dict[int, Any] = {}

    def _get(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return None
        call = self._calls.get(id(module)) or module.__dict__.get(ATTRIBUTE)
        if call is None and self.default_call is not None:
            return self.default_call.__get__(module)
        # nn.Module.__call__ reads the slot twice, and calls the second answer if the first is not None. Another thread
        # may detach the wrapper in between.
        if call is None and sys._getframe(1).f_code is nn.Module._wrapped_call_impl.__code__:
            return module._call_impl
        return call

    # A partial, because Dynamo follows functions and takes the result of other callables as it is.
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

    forget = clear


_CallSlot: Any = _PythonCallSlot
_SITES: dict[str, Any] = {}  # the descriptors beside the slot
if _extension.C is not None:
    _CallSlot = _extension.C.CallSlot
    _SITES = {SITE: _extension.C.CallSite(), IS_WATCHED: _extension.C.IsWatched()}


class _Descriptor(_CallSlot):  # type: ignore[misc]
    """Data descriptor in nn.Module. A value that is set goes into the module's `__dict__`, as without it."""

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
            if attached_here := wrappers(module):
                attached_here[-1].inner = value


_slot = _Descriptor()
# Reentrant: the garbage collector may free a module anywhere in here, and so call _forget.
_lock = threading.RLock()
_alive: dict[int, weakref.ref[nn.Module]] = {}  # modules with a wrapper or a site, by their ids
children.subjects = _alive


def _install() -> None:
    """Put the descriptors into nn.Module. Each change of a class makes the interpreter forget its lookups."""
    if nn.Module.__dict__[ATTRIBUTE] is not _slot:
        for name, descriptor in _SITES.items():
            setattr(nn.Module, name, descriptor)
        nn.Module._compiled_call_impl = _slot


def is_in_use() -> bool:
    """Return whether a module has a wrapper or a site, or a thread may be about to read the slot a second time."""
    return bool(_alive) or default_call() is not None or is_inside([nn.Module._wrapped_call_impl.__code__])


def uninstall() -> None:
    """Undo the changes of nn.Module. No wrapper or site may be in use."""
    with _lock:
        if nn.Module.__dict__[ATTRIBUTE] is _slot:
            nn.Module._compiled_call_impl = None
            for name in _SITES:
                delattr(nn.Module, name)


def set_default_call(function: Callable[..., Any] | None) -> None:
    """Let `function(module, ...)` make the calls of all modules without a wrapper; None ends it."""
    _install()
    _slot.default_call = function


def default_call() -> Callable[..., Any] | None:
    """Return the function that makes the calls of modules without a wrapper, or None."""
    function: Callable[..., Any] | None = _slot.default_call
    return function


def wrappers(module: nn.Module) -> list[Any]:
    """Return the wrappers of the module's call, the outermost first."""
    attached_here = []
    current = _slot.find(id(module))
    while isinstance(current, CallWrapper):
        attached_here.append(current)
        current = current.inner
    return attached_here


def watching(module: nn.Module) -> list[Any]:
    """Return the wrappers of the module's watches, the outermost first."""
    return [wrapper for wrapper in wrappers(module) if wrapper.recorder is not None]


def needs_operators(module: nn.Module) -> bool:
    """Return whether graphs need operators for the module's calls: for its watch now, or for the next one."""
    return bool(getattr(module, IS_WATCHED, False)) or _has_site(module)


def _has_site(module: nn.Module) -> bool:
    return bool(_SITES) and _slot.has_site(id(module))


def attach(module: nn.Module, wrapper: Any) -> None:
    """Attach the wrapper to the module's slot, outside all wrappers there."""
    key = id(module)
    with _lock:
        before = _slot.find(key)
        wrapper.inner = module.__dict__.get(ATTRIBUTE) if before is None else before
        if before is None:
            _install()
            _keep(module)
        _slot.set(key, wrapper)


def detach(module: nn.Module, wrapper: Any) -> None:
    """Detach the wrapper, also from inside others. Does nothing where it is not attached."""
    key = id(module)
    with _lock:
        attached_here = wrappers(module)
        position = next((i for i, known in enumerate(attached_here) if known is wrapper), None)
        if position is None:
            return
        if position > 0:
            attached_here[position - 1].inner = wrapper.inner
        elif isinstance(wrapper.inner, CallWrapper):
            _slot.set(key, wrapper.inner)
        else:
            _slot.clear(key)
            if not _has_site(module):
                _alive.pop(key, None)


def _keep(module: nn.Module) -> None:
    _alive.setdefault(id(module), weakref.ref(module, functools.partial(_forget, id(module))))


def _forget(key: int, _: object) -> None:
    _alive.pop(key, None)
    _slot.forget(key)


if _SITES:
    _slot.keep_sites(_keep)
