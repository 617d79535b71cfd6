"""Functions whose calls are recorded like those of modules: `nanwatch.watched`.

A recorder knows modules, and torch.compile puts its operators where modules are called. So each function gets a module
that belongs to no model, and the watch attaches a wrapper to that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from torch import nn
from torch.compiler import is_compiling

from .slot import detach, watching, wrappers
from .wrapped_names import Named, find_module

P = ParamSpec("P")
R = TypeVar("R")

# Attachments of running watches, the oldest first.
_running: list[weakref.ref[Any]] = []
_functions: weakref.WeakValueDictionary[int, Function] = weakref.WeakValueDictionary()


class Function(nn.Module):
    """A function as a module, so that its calls can be recorded."""

    is_watched_function = True  # for the recorders: such a call is no new batch of the model

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self.name = name
        self.function = function
        _functions[id(self)] = self

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


@overload
def watched(function: Callable[P, R], /, *, name: str | None = None) -> Callable[P, R]: ...
@overload
def watched(*, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def watched(function: Any = None, /, *, name: str | None = None) -> Any:
    """Let the running watch record each call of a function, like that of a module: `@nanwatch.watched`.

    A frame has the tensors among its arguments and in its result, and a failure names the function. Without a running
    watch the function is called as it is. With several watches the one that began first records it, until it stops. A
    call outside the model is a batch of its own.

    name: its name in reports; its own by default.

    Raises TypeError for an object that is no function, and for a module, which `watch` records.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> @nanwatch.watched
        ... def ratio_loss(x, y):
        ...     return (x / y).mean()
        >>> with nanwatch.watch(model):
        ...     try:
        ...         ratio_loss(torch.zeros(2), torch.zeros(2))
        ...     except nanwatch.NonFiniteError as error:
        ...         print(str(error).splitlines()[0])
        nan first seen in `output` of ratio_loss (Function) in batch 0
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f'name should be text such as "loss", got {name!r}')
    if function is None:
        return functools.partial(watched, name=name)
    if not callable(function) or isinstance(function, nn.Module | type):
        raise TypeError(f"watched needs a function, got {function!r}; pass a module to nanwatch.watch")
    module = Function(name or str(getattr(function, "__name__", type(function).__name__)), function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():  # a guard on whether a watch runs would compile this again
            if not _running:
                return function(*args, **kwargs)
            _attach(module)
        return module(*args, **kwargs)

    return call


def _attach(module: Function) -> None:
    attachment = _running[0]() if _running and not watching(module) else None
    if attachment is not None:
        attachment.add(module.name, module)


def watch_begins(attachment: Any, model: nn.Module) -> None:
    """Attach this watch to the functions that no other watch records, now and when new ones are called."""
    reference = weakref.ref(attachment, watch_ends)
    _running.append(reference)
    # The wrappers of functions keep the recorder, and would keep it after the model is gone.
    weakref.finalize(model, _detach, reference).atexit = False
    for module in list(_functions.values()):
        _attach(module)


def _detach(reference: weakref.ref[Any]) -> None:
    attachment = reference()
    for module in () if attachment is None else list(_functions.values()):
        for wrapper in watching(module):
            if wrapper.attachment() is attachment:
                detach(module, wrapper)
    watch_ends(reference)


def watch_ends(reference: weakref.ref[Any]) -> None:
    """Attach no more functions to the attachment. Does nothing the second time."""
    if reference in _running:  # references to one object are equal while it lives
        _running.remove(reference)


def find_called(model: nn.Module, name: str) -> Named | None:
    """Return the module of this name or path, or the latest function of this name that a watch has, or None."""
    if (module := find_module(model, name)) is not None:
        return module
    functions = [x for x in list(_functions.values()) if x.name == name and wrappers(x)]
    return Named(name, name, functions[-1]) if functions else None
