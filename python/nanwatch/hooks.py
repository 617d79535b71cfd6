"""Forward hooks on modules; from their calls, which batch it is, who called, and whether the call returned."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle


class Observer(Protocol):
    """Who wants to know."""

    def batch_started(self, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost call begins. Not called for a forward that is recomputed during a backward."""

    def call_returned(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A watched call returned `output`. What this raises, the call raises."""

    def batch_ended(self, batch: int, completed: bool) -> None:
        """The outermost call returned (`completed`) or raised."""


class Call:
    """A module call that has begun.

    `caller` is the name of the hooked module from whose forward it was made, or None; `recomputed` is True
    when the call runs again inside a backward.
    """

    __slots__ = ("_handling", "batch", "caller", "name", "recomputed")

    def __init__(self, name: str, batch: int, caller: str | None, recomputed: bool, handling: int) -> None:
        self.name = name
        self.batch = batch
        self.caller = caller
        self.recomputed = recomputed
        self._handling = handling

    def is_unwinding(self) -> bool:
        """True when the call is being left by an exception.

        A hook with always_call=True gets None for an output then, and so it does from a forward that returns
        None. What tells them apart is the exception being handled: another one than when the call began.
        """
        return id(sys.exc_info()[1]) != self._handling


class _Thread(threading.local):
    """The calls under way in one thread, outermost first. Names only: nothing here keeps a tensor alive."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


class Hooks:
    """The hooks on one model.

    `modules` are (name, module) pairs, each module once; calls of those in `observed` are reported, the
    others only mark where a batch begins and ends. A batch is one outermost call: of the root, or of any
    hooked module called from outside all of them.
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], observed: set[str], observer: Observer
    ) -> None:
        self._observer = observer
        self._thread = _Thread()
        self._numbers = itertools.count()
        self._latest = 0
        self._handles: list[RemovableHandle] = []
        for name, module in modules:
            # First of all pre-hooks, so that what another one calls belongs to this call. always_call, so
            # that a call left by an exception is left here too.
            enter = _Enter(self, name)
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            leave = _Leave(self, name, name in observed)
            self._handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        """Take every hook off again; a second time does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins."""
        calls = self._thread.calls
        if name == "" and calls and not self._root_runs_twice():
            # Ctrl-C in a notebook: an exception that is no Exception leaves a forward without telling its
            # hooks.
            calls.clear()
        handling = id(sys.exc_info()[1])
        if calls:
            outer = calls[-1]
            calls.append(Call(name, outer.batch, outer.name, outer.recomputed, handling))
            return
        recomputed = _in_backward()
        if not recomputed:
            self._latest = next(self._numbers)
        call = Call(name, self._latest, None, recomputed, handling)
        calls.append(call)
        if not recomputed:
            self._observer.batch_started(call.batch, args, kwargs)

    def _root_runs_twice(self) -> bool:
        """Whether two calls of the root are really under way in this thread. Slow: rarely asked."""
        roots = 0
        frame = sys._getframe().f_back
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:
                hooks = frame.f_locals["self"]._forward_pre_hooks.values()
                roots += any(isinstance(h, _Enter) and h.hooks is self and h.name == "" for h in hooks)
            frame = frame.f_back
        return roots > 1

    def end(
        self, name: str, is_observed: bool, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """A call ends, by returning or by an exception."""
        calls = self._thread.calls
        for depth in range(len(calls) - 1, -1, -1):
            if calls[depth].name == name:
                call = calls[depth]
                # Those further in were left by an exception that told no hook, and that this call caught.
                del calls[depth:]
                break
        else:
            # Never entered: a global pre-hook raised before ours ran, or the call began before the hooks were
            # here.
            return
        completed = not call.is_unwinding()
        try:
            if completed and is_observed:
                self._observer.call_returned(call, module, args, kwargs, output)
        except BaseException:
            completed = False
            raise
        finally:
            if not calls and not call.recomputed:
                self._observer.batch_ended(call.batch, completed)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _unwatched(*_: Any) -> None:
    """What a hook becomes in a copy of the model: a copy is not watched."""


def _inert() -> Any:
    return _unwatched


class _Enter:
    __slots__ = ("hooks", "name")

    def __init__(self, hooks: Hooks, name: str) -> None:
        self.hooks = hooks
        self.name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A compiler that traces the model would trace the recording too; it sees nothing here, and neither do
        # we.
        if not is_compiling():
            self.hooks.begin(self.name, args, kwargs)

    def __reduce__(self) -> Any:
        return _inert, ()


class _Leave:
    __slots__ = ("hooks", "is_observed", "name")

    def __init__(self, hooks: Hooks, name: str, is_observed: bool) -> None:
        self.hooks = hooks
        self.name = name
        self.is_observed = is_observed

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not is_compiling():
            self.hooks.end(self.name, self.is_observed, module, args, kwargs, output)

    def __reduce__(self) -> Any:
        return _inert, ()
