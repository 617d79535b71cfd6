"""The slot before a module's call, the wrappers attached to it, and exclusive access to a model during a re-run.

Watches and re-runs attach wrappers without a change to the module.

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

Another thread that called the model during a re-run would be recorded as a part of it, draw from the random states that
the re-run restores, and lose its writes to buffers. So that thread waits for the end of the re-run.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from ..numerics import _extension
from ..util.program import each_module, when_imported
from .global_hooks import children, is_inside

ATTRIBUTE = "_compiled_call_impl"
SITE = "_nanwatch_site"
IS_WATCHED = "_nanwatch_is_watched"

# Seconds after which other threads proceed anyway, so that a re-run cannot deadlock by waiting for a thread.
PATIENCE = 60.0


class CallWrapper(ABC):
    """Callable before a module's call. `inner` is the next: a wrapper, the result of `module.compile()`, or None."""

    inner: Any
    recorder: Any = None


class Changes:
    """Changes of a module of PyTorch, made as soon as it is imported, until `undo`."""

    def __init__(self, module_name: str, change: Callable[[], object]) -> None:
        self._module_name, self._change = module_name, change
        self._is_made = False
        self._undo: list[Callable[[], object]] = []

    def make(self) -> None:
        """Make the changes now, or when the module is imported. Does nothing the second time."""
        if not self._is_made:
            self._is_made = True
            self._undo.append(when_imported(self._module_name, self._change))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Give a class or a module another attribute of this name, which stays where a library replaces it later."""
        original = getattr(owner, name)

        def restore() -> None:
            if getattr(owner, name) is value:
                setattr(owner, name, original)

        self._undo.append(restore)
        setattr(owner, name, value)

    def undo(self) -> None:
        """Leave the module as it was found."""
        while self._undo:
            self._undo.pop()()
        self._is_made = False


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
    """Undo the changes of nn.Module and of torch.distributed.pipelining. No wrapper or site may be in use."""
    with _lock:
        if nn.Module.__dict__[ATTRIBUTE] is _slot:
            nn.Module._compiled_call_impl = None
            for name in _SITES:
                delattr(nn.Module, name)
        shape_inference.undo()


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


class PythonWatchedCall(CallWrapper):
    """Wrapper of a module's call while a PythonRecorder watches it."""

    def __init__(self, recorder: Any, module: nn.Module, inner: Any, node: int) -> None:
        self.recorder, self.inner, self._node = recorder, inner, node
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The module, or None once it is gone."""
        return self._module()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the module's call, and record it."""
        if is_compiling():
            return self.module._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        module = self._module()  # not the property: torch.compile, which skips this frame, would follow it
        if module is None:
            raise ReferenceError("nanwatch: the watched module of this call no longer exists")
        target = module._call_impl if self.inner is None else self.inner
        call = self.recorder.enter(self._node, module, args, kwargs)
        if call is None:
            return target(*args, **kwargs)
        outputs: tuple[Any, ...] = ()
        try:
            outputs = (target(*args, **kwargs),)
        finally:
            self.recorder.leave(call, module, args, kwargs, outputs)
        return outputs[0]


class TemporaryWrapper(CallWrapper):
    """Wrapper of a module's call until the end of a `with` block. Keeps the module alive.

    `run(wrapper, args, kwargs)` makes the call. `run_inner` makes it as if this wrapper were not attached.
    """

    def __init__(self, module: nn.Module, run: Callable[[TemporaryWrapper, Any, Any], Any]) -> None:
        self.module, self._run = module, run
        self.inner: Any = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call."""
        return self._run(self, args, kwargs)

    def run_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call without this wrapper."""
        return (self.module._call_impl if self.inner is None else self.inner)(*args, **kwargs)


@contextmanager
def attached(temporary: Iterable[TemporaryWrapper]) -> Iterator[None]:
    """Attach these wrappers to their modules inside the block."""
    with ExitStack() as after:
        for wrapper in temporary:
            after.callback(detach, wrapper.module, wrapper)
            attach(wrapper.module, wrapper)
        yield


def wrap_calls(modules: Iterable[nn.Module], run: Callable[..., Any]) -> AbstractContextManager[None]:
    """Return a context inside which `run(module, args, kwargs)` makes this thread's calls of these modules.

    They are made after the user's hooks. For use inside `BatchSnapshot.again`, where no watch records and compiled
    modules run eagerly.
    """
    owner = threading.get_ident()

    def run_here(wrapper: TemporaryWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_here = threading.get_ident() == owner
        return run(wrapper.module, args, kwargs) if is_here else wrapper.run_inner(args, kwargs)

    return attached(TemporaryWrapper(module, run_here) for module in {id(x): x for x in modules}.values())


def is_of_thread(owner: int) -> bool:
    """Return whether the caller runs in this thread, or in an autograd thread, which may run this one's backward."""
    return threading.get_ident() == owner or torch._C._current_graph_task_id() != -1


_alone = threading.local()  # `has_ended` is set at the end of the outermost `unwatched` of this thread


def waiting_ends() -> Callable[[], None]:
    """Return a function that ends the wait of other threads for this thread's `unwatched`, from any thread."""
    has_ended = getattr(_alone, "has_ended", None)
    return (lambda: None) if has_ended is None else has_ended.set


@contextmanager
def unwatched(root: nn.Module) -> Iterator[None]:
    """Record no call of a module in the tree inside the block. Other threads that call one wait for its end.

    After PATIENCE seconds no thread waits any more. With nested blocks they wait for the outermost. The watches stay
    attached, so that one that is stopped or paused meanwhile stays so.
    """
    outer = getattr(_alone, "has_ended", None)
    has_ended, owner = outer or threading.Event(), threading.get_ident()

    def run(wrapper: TemporaryWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_of_thread(owner):
            compiled = wrapper.module.__dict__.get(ATTRIBUTE)
            return (wrapper.module._call_impl if compiled is None else compiled)(*args, **kwargs)
        if not has_ended.wait(PATIENCE):
            has_ended.set()
        return wrapper.run_inner(args, kwargs)

    watched = [module for _, module in each_module(root) if wrappers(module)]
    # Hooks of gradients on weights are in no slot, so their recorders are suspended.
    recorders = {id(x.recorder): x.recorder for module in watched for x in watching(module)}
    with ExitStack() as after:
        if outer is None:
            _alone.has_ended = has_ended
            after.callback(delattr, _alone, "has_ended")
            after.callback(has_ended.set)
        for recorder in recorders.values():
            recorder.suspend(True)
            after.callback(recorder.suspend, False)
        after.enter_context(attached(TemporaryWrapper(module, run) for module in watched))
        yield


# Before its first batch torch.distributed.pipelining calls a stage's module, and its backward, on uninitialised memory
# to infer the shapes of its tensors. Such a call is no batch, and may hold nan.
_STAGE = "torch.distributed.pipelining.stage"
# The first name is torch 2.8's, which infers shapes on zeros. The others are torch 2.13's.
_SHAPE_INFERENCE = ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")


def _leave_unrecorded() -> None:
    stage = getattr(sys.modules[_STAGE], "PipelineStage", object)
    for name in vars(stage).keys() & {*_SHAPE_INFERENCE}:
        shape_inference.replace(stage, name, _unrecorded(vars(stage)[name]))


def _unrecorded(infer: Any) -> Any:
    @functools.wraps(infer)
    def unrecorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = getattr(self, "submod", None)
        with unwatched(module) if isinstance(module, nn.Module) else nullcontext():
            return infer(self, *args, **kwargs)

    return unrecorded


shape_inference = Changes(_STAGE, _leave_unrecorded)
