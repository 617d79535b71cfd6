"""Hooks for all optimizers and modules: before and after steps, and when a module gets a child.

PyTorch iterates over its own hooks without a copy: one that is added or removed meanwhile ends the user's step by an
error. A Watch does that when its own report stops it, in another thread, or when the garbage collector frees it. So
nanwatch registers one hook of each kind with PyTorch, at the first use and for good, which iterates over a copy of the
hooks here.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[..., Any]


class GlobalHooks:
    """Hooks of one kind, called in the order in which they were added. Any thread may add and remove them at any time.

    If a hook returns other arguments, the next one gets these behind the first argument, and the last are the result.
    torch.compile follows the hooks, unless they are not `traced`: then it finds none.
    """

    def __init__(self, register: Callable[[Hook], object], *, traced: bool = True) -> None:
        self._traced = traced
        self._register: Callable[[Hook], object] | None = register
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._hooks: dict[int, Hook] = {}

    def __len__(self) -> int:
        return len(self._hooks)

    def add(self, hook: Hook) -> GlobalHook:
        """Call `hook` from now on, until `remove()` of the handle."""
        number = next(self._numbers)
        self._hooks[number] = hook
        with self._lock:
            register, self._register = self._register, None
        if register is not None:
            register(self._call)
        return GlobalHook(self._hooks, number)

    def _call(self, subject: Any, *rest: Any) -> Any:
        if not self._traced and is_compiling():
            return None
        changed = None
        for hook in self._hooks.copy().values():
            found = hook(subject, *(rest if changed is None else changed))
            changed = changed if found is None else found
        return changed


class GlobalHook:
    """Handle of one hook."""

    def __init__(self, hooks: dict[int, Hook], number: int) -> None:
        self._hooks = hooks
        self._number = number

    def remove(self) -> None:
        """Remove the hook. Does nothing the second time."""
        self._hooks.pop(self._number, None)


class Handles:
    """Handles of registered hooks, which are removed by `remove` or when `owner` is collected."""

    def __init__(self, owner: object, handles: Iterable[Any]) -> None:
        self._handles = list(handles)
        weakref.finalize(owner, _remove, self._handles)

    def remove(self) -> None:
        """Remove the hooks. Does nothing the second time."""
        _remove(self._handles)


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


# hook(optimizer, args, kwargs), which may return other (args, kwargs); and after the step.
before_steps = GlobalHooks(register_optimizer_step_pre_hook)
after_steps = GlobalHooks(register_optimizer_step_post_hook)
# hook(module, name, child). Not traced, because compiled autograd registers a module while Dynamo follows.
children = GlobalHooks(register_module_module_registration_hook, traced=False)
