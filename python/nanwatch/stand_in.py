"""What stands before the calls of some modules for the time of a second run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .calls import ATTRIBUTE, put
from .turn import calling_module

# Makes the call of a module, as `module._call_impl(*args, **kwargs)` would.
Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class _StandIn:
    def __init__(self, module: nn.Module, run: Run, below: Any) -> None:
        self._module = module
        self._run = run
        self._below = below
        self._thread = threading.get_ident()

    def __reduce__(self) -> Any:
        """In a copy or a pickle of the module nothing stands here."""
        return type(None), ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call through `run`; a replica of DataParallel, or another thread, makes its own, unseen."""
        module = calling_module(self._module)
        if module is not self._module:
            return module._call_impl(*args, **kwargs)
        if threading.get_ident() != self._thread:
            return (module._call_impl if self._below is None else self._below)(*args, **kwargs)
        return self._run(module, args, kwargs)


@contextmanager
def stand_in(modules: Iterable[nn.Module], run: Run) -> Iterator[None]:
    """Inside, the calls of these modules that this thread makes are made by `run`, after the user's hooks.

    For use inside `BatchStart.again`, where no watch stands there, and compiled modules run eagerly anyhow.
    """
    before = [(module, module.__dict__.get(ATTRIBUTE)) for module in modules]
    try:
        for module, below in before:
            put(module, _StandIn(module, run, below))
        yield
    finally:
        for module, call in before:
            if isinstance(module.__dict__.get(ATTRIBUTE), _StandIn):
                put(module, call)
