"""Watched calls: wrappers that record the calls of modules, and how they are attached to the modules of a model.

A WatchedCall is in the slot before its module's call (slot.py). It sees the arguments and the result of a call, after
all hooks of the user. A watch registers no forward hook: one makes PyTorch itself 0.85 µs slower per call, and PyTorch
calls no hook when a forward ends by an exception.
"""

from __future__ import annotations

import functools
import sys
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from ..numerics import _extension
from ..recording.observe import parameter_mesh
from ..recording.recorder import PythonRecorder
from ..util.messages import warn_user, with_utf8
from . import compiled
from .execution_context import unwatched
from .functions import watch_begins, watch_ends
from .global_hooks import Changes, Handles, Hook, after_steps, children, weakly
from .slot import ATTRIBUTE, CallWrapper, attach, detach, is_in_use, uninstall, wrappers
from .wrapped_names import child_name, is_recorded, named_modules


def check_model(model: object) -> None:
    """Raise TypeError for an object that is no module, or one whose calls cannot be seen."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"watch() needs a module, got the class {model.__name__}; pass {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch() needs a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"watch() cannot hook the modules inside a {type(model).__name__};"
            " pass the model as it was before torch.jit"
        )


class Attachment:
    """Recorder on the modules of one model, until `remove`.

    `observed(name)` says whether the calls of a module are recorded. The calls of other modules only mark where a batch
    begins. `allow_inf(name, module)` says which infinities are meant, and `after_step(optimizer, ...)` is called after
    every step. Modules registered later in a watched module are watched too.
    """

    def __init__(
        self, model: nn.Module, recorder: Any, observed: Hook, allow_inf: Hook, after_step: Hook
    ) -> None:
        self.is_attached = True
        self._recorder, self._observed, self._allow_inf = recorder, observed, allow_inf
        _shape_inference.make()
        self._names = WeakIdKeyDictionary()
        self._nodes: dict[tuple[str, type], int] = {}
        # The recorder knows FSDP's own classes, but the model may be a part of a module that was sharded as a whole.
        if parameter_mesh(model):
            recorder.gathers_weights = True
        for named in named_modules(model):
            self.add(named.name, named.module)
        compiled.follow_watched_calls()
        # torch's registries are global and outlive this: the hooks must keep neither it nor the model alive.
        hooks = after_steps.add(after_step), children.add(weakly(self._registered))
        self._hooks = Handles(self, hooks)
        watch_begins(self, model)

    def add(self, name: str, module: nn.Module) -> None:
        """Watch a module under this name, unless it is watched already."""
        if self._names.get(module) is not None:
            return
        owner = next(kind for kind in type(module).__mro__ if ATTRIBUTE in vars(kind))
        if owner is not nn.Module:
            warn_user(
                f"calls of {owner.__name__} are not recorded: the class has its own attribute {ATTRIBUTE}"
            )
        node = self._node_of(name, module)
        call = _watched_call(self._recorder, module, None, node)
        call.attachment = weakref.ref(self)
        attach(module, call)
        self._names[module] = name

    def excuse_again(self) -> None:
        """Ask anew which infinities are meant."""
        for module, name in self._names.items():
            self._node_of(name, module)

    def _node_of(self, name: str, module: nn.Module) -> int:
        """Return the node of this name and class. A recorder keeps each, and a forward may register modules."""
        key, allow_inf = (name, type(module)), self._allow_inf(name, module)
        if key in self._nodes:
            self._recorder.set_allow_inf(self._nodes[key], allow_inf)
        else:
            records = is_recorded(module) and self._observed(name)
            self._nodes[key] = self._recorder.add_node(with_utf8(name), module, records, allow_inf)
        return self._nodes[key]

    def _registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is None or (known := self._names.get(parent)) is None:
            return
        for named in named_modules(module, child_name(parent, known, name)):
            self.add(named.name, named.module)

    def remove(self) -> None:
        """Leave every module as it was found. Does nothing the second time."""
        self.is_attached = False
        watch_ends(weakref.ref(self))
        self._recorder.paused = True
        self._recorder.forget_tensors()
        self._hooks.remove()
        for reference in self._names.keyrefs():  # a copy: another thread may register a module
            module = reference()
            for wrapper in () if module is None else wrappers(module):
                if wrapper.recorder is self._recorder:
                    detach(module, wrapper)
        self._names.clear()
        self._nodes.clear()
        leave_torch()


def leave_torch() -> None:
    """Take out of torch what watches have put there, once nothing needs it.

    Where a thread is inside a module's call, it stays until the next watch stops. Where torch.compile has met a module
    meanwhile, it stays, so that the graphs serve the next watch.
    """
    if not is_in_use() and compiled.leave():
        uninstall()
        _shape_inference.undo()


# The wrappers.


def _watched_call(recorder: Any, module: nn.Module, inner: Any, node: int) -> Any:
    if isinstance(recorder, PythonRecorder):
        return PythonWatchedCall(recorder, module, inner, node)
    return NativeWatchedCall(recorder, module, inner, node)


if _extension.C is not None:
    _Native: Any = _extension.C.WatchedCall

    class NativeWatchedCall(_Native):  # type: ignore[misc]
        """Wrapper of a module's call while a CallRecorder watches it.

        The interpreter calls C++. torch.compile reads the `__call__` below, which calls the module itself.
        """

        def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
            """Make the module's call. The interpreter never runs this."""
            return self.module._call_impl(*args, **kwargs)

    _extension.C.take_call(NativeWatchedCall)
    CallWrapper.register(NativeWatchedCall)


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


compiled.SKIPPED.append(PythonWatchedCall.__call__)


# Before its first batch torch.distributed.pipelining calls a stage's module, and its backward, on uninitialised memory
# to infer the shapes of its tensors. Such a call is no batch, and may hold nan.
_STAGE = "torch.distributed.pipelining.stage"
# The first name is torch 2.8's, which infers shapes on zeros. The others are torch 2.13's.
_SHAPE_INFERENCE = ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")


def _leave_unrecorded() -> None:
    stage = getattr(sys.modules[_STAGE], "PipelineStage", object)
    for name in vars(stage).keys() & {*_SHAPE_INFERENCE}:
        _shape_inference.replace(stage, name, _unrecorded(vars(stage)[name]))


def _unrecorded(infer: Any) -> Any:
    @functools.wraps(infer)
    def unrecorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = getattr(self, "submod", None)
        with unwatched(module) if isinstance(module, nn.Module) else nullcontext():
            return infer(self, *args, **kwargs)

    return unrecorded


_shape_inference = Changes(_STAGE, _leave_unrecorded)
