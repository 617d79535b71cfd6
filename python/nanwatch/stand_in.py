"""What stands before the calls of some modules for a time."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .calls import ATTRIBUTE, put

# Makes the call of a module, as `module._call_impl(*args, **kwargs)` would.
Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class StandIn(ABC):
    """What stands in a module's place for a time, before `below` or, where that is None, the module's own call."""

    def __init__(self, module: nn.Module, below: Any) -> None:
        self._module = module
        self._below = below

    def __reduce__(self) -> Any:
        """In a copy or a pickle of the module nothing stands here."""
        return type(None), ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call through `run`; a replica of DataParallel makes its own, unseen.

        A replica has a copy of the original's __dict__, and with it the very object that stands there: only the frame
        of nn.Module.__call__ knows which of them calls.
        """
        caller = sys._getframe(1)
        if caller.f_code.co_name == "_wrapped_call_impl" and caller.f_locals["self"] is not self._module:
            return caller.f_locals["self"]._call_impl(*args, **kwargs)
        return self.run(self._module, args, kwargs)

    @abstractmethod
    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the module's call."""

    def run_below(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make it as if this did not stand there."""
        return (module._call_impl if self._below is None else self._below)(*args, **kwargs)


class _OfThisThread(StandIn):
    """Makes the calls of the thread that made it through a function; those of others unseen."""

    def __init__(self, module: nn.Module, run: Run, below: Any) -> None:
        super().__init__(module, below)
        self._run = run
        self._thread = threading.get_ident()

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        own = threading.get_ident() == self._thread
        return (self._run if own else self.run_below)(module, args, kwargs)


@contextmanager
def stand_in(modules: Iterable[nn.Module], run: Run) -> Iterator[None]:
    """Inside, the calls of these modules that this thread makes are made by `run`, after the user's hooks.

    For use inside `BatchStart.again`, where no watch stands there, and compiled modules run eagerly anyhow.
    """
    before = [(module, module.__dict__.get(ATTRIBUTE)) for module in modules]
    try:
        for module, below in before:
            put(module, _OfThisThread(module, run, below))
        yield
    finally:
        for module, call in before:
            if isinstance(module.__dict__.get(ATTRIBUTE), _OfThisThread):
                put(module, call)
