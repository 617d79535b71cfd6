"""Hooks for all optimizers and modules: before and after steps, after a step's closure, when a module gets a child.

PyTorch iterates over its own hooks without a copy: one that is added or removed meanwhile ends the user's step by an
error. A Watch does that when its own report stops it, in another thread, or when the garbage collector frees it. So
nanwatch registers one hook of each kind with PyTorch, which iterates over a copy of the hooks here. When the last of
these is removed, PyTorch's hook goes too, unless a thread is inside the function that iterates over it.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack
from traceback import walk_stack
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..numerics._extension import instances_of
from ..util.program import when_imported

Hook = Callable[..., Any]


def is_inside(codes: Iterable[CodeType]) -> bool:
    """Return whether a call of a function with one of these codes is under way in any thread."""
    stacks, wanted = map(walk_stack, sys._current_frames().values()), {*codes}
    return any(frame.f_code in wanted for stack in stacks for frame, _ in stack)


class GlobalHooks:
    """Hooks of one kind, called in the order in which they were added. Any thread may add and remove them at any time.

    `register` adds a hook to PyTorch's, over which functions with the codes `callers` iterate. Without `register`
    nanwatch itself makes the `call`. A hook may return other arguments: the next hook gets them after the first
    argument, and the last ones are the result. torch.compile compiles no hook. Compiled code breaks its graph to call
    hooks that are `traced`, and skips others. `subjects`, if set, are the ids of the first arguments that count.
    """

    def __init__(
        self,
        register: Callable[[Hook], Any] | None = None,
        callers: Iterable[CodeType] = (),
        *,
        traced: bool = True,
    ) -> None:
        self._register, self._callers, self._traced = register, tuple(callers), traced
        self.subjects: Container[int] | None = None
        self._handle: Any = None
        self._lock = threading.RLock()  # the garbage collector may remove a hook anywhere
        self._hooks: dict[object, Hook] = {}

    def add(self, hook: Hook) -> SimpleNamespace:
        """Call `hook` from now on, until `remove()` of the result, which may be called twice."""
        key = object()
        with self._lock:
            self._hooks[key] = hook
            if self._handle is None and self._register is not None:
                self._handle = self._register(self.call)
        return SimpleNamespace(remove=functools.partial(self._remove, key))

    def _remove(self, key: object) -> None:
        """Remove a hook, and PyTorch's with the last."""
        with self._lock:
            self._hooks.pop(key, None)
            if self._hooks or is_inside(self._callers):
                return
            # The garbage collector may have removed another hook in this thread meanwhile, and PyTorch's.
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.remove()

    def call(self, subject: Any, *rest: Any) -> Any:
        """Call the hooks, as PyTorch does. Return the changed arguments, or None."""
        is_idle = (compiles := is_compiling()) and not self._traced
        # `subjects` first: each forward of a Llama makes a ModuleList of its layers.
        if is_idle or (self.subjects is not None and id(subject) not in self.subjects):
            return None
        # Dynamo compiles also what eager code calls between two graphs. To disable it takes 2 µs.
        if compiles or get_eval_frame_callback() is not None:
            return self._call_uncompiled(subject, *rest)
        return self._call(subject, *rest)

    def _call(self, subject: Any, *rest: Any) -> Any:
        changed = None
        for hook in self._hooks.copy().values():
            arguments = hook(subject, *(rest if changed is None else changed))
            changed = changed if arguments is None else arguments
        return changed

    _call_uncompiled = _disable_dynamo(_call)


def weakly(method: Any) -> Hook:
    """Return a function that calls a method while its object is alive, and does not keep the object alive."""
    reference, function = weakref.ref(method.__self__), method.__func__
    return lambda *args: None if (owner := reference()) is None else function(owner, *args)


class Handles:
    """Handles of registered hooks, which are removed by `remove()` or when `owner` is collected, once."""

    def __init__(self, owner: object, handles: Iterable[Any]) -> None:
        stack = ExitStack()
        for handle in handles:
            stack.callback(handle.remove)
        self.remove = weakref.finalize(owner, stack.close)


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
        steps, self._undo, self._is_made = self._undo, [], False
        for step in reversed(steps):
            step()


# hook(optimizer, args, kwargs), which may return other (args, kwargs); and after the step.
_STEP = (Optimizer.profile_hook_step(lambda self: None).__code__,)
before_steps = GlobalHooks(register_optimizer_step_pre_hook, _STEP)
after_steps = GlobalHooks(register_optimizer_step_post_hook, _STEP)
# hook(module, name, child). Not traced, because compiled autograd registers a module while Dynamo follows.
_REGISTRATION = [x.__code__ for x in (nn.Module.register_module, nn.Module.add_module, nn.Module.__setattr__)]
children = GlobalHooks(register_module_module_registration_hook, _REGISTRATION, traced=False)


def steps_under_way() -> list[Optimizer]:
    """Return the optimizers whose steps are under way in this thread."""
    return [x.f_locals["self"] for x, _ in walk_stack(sys._getframe(1)) if x.f_code in _STEP]


def with_check_after_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], object]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the step, with `check` after its closure; None for a step without a closure.

    Lightning makes forward and backward in a closure, also for optimizers that call it once.
    """
    # Behind the optimizer itself, and perhaps behind further arguments of its class.
    place = next((i for i, value in enumerate(args) if i > 0 and callable(value)), None)
    closure = kwargs.get("closure") if place is None else args[place]
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def checked(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        check()
        return loss

    if place is None:
        return args, {**kwargs, "closure": checked}
    return (*args[:place], checked, *args[place + 1 :]), kwargs


def find_scaler() -> Callable[[], Any]:
    """Return a reference to the one GradScaler in use in this process; to None where there are none or several.

    Nothing leads from a model to its scaler, so this looks through all objects: 10 ms for a million.
    """
    known = instances_of(torch.amp.GradScaler)
    scalers = [x for x in known if getattr(x, "_enabled", False) and x._scale is not None]
    return weakref.ref(scalers[0]) if len(scalers) == 1 else lambda: None
