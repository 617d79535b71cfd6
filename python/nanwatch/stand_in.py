"""What stands before the calls of some modules for the time of a second run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .calls import ATTRIBUTE, put

# Makes the call of a module, as `module._call_impl(*args, **kwargs)` would.
Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def calling_module(own: nn.Module) -> Any:
    """The module whose call the caller of this stands before: `own`, unless a replica has it.

    A replica for DataParallel has a copy of the original's __dict__, and with it the very object that stands there:
    only the frame of nn.Module.__call__ knows which of them calls.
    """
    frame = sys._getframe(2)
    return frame.f_locals["self"] if frame.f_code.co_name == "_wrapped_call_impl" else own


class _StandIn:
    def __init__(self, module: nn.Module, run: Run) -> None:
        self._module = module
        self._run = run

    def __reduce__(self) -> Any:
        """In a copy or a pickle of the module nothing stands here."""
        return type(None), ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call through `run`; a replica of DataParallel makes its own, unseen."""
        module = calling_module(self._module)
        return (self._run if module is self._module else _call)(module, args, kwargs)


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module._call_impl(*args, **kwargs)


@contextmanager
def stand_in(modules: Iterable[nn.Module], run: Run) -> Iterator[None]:
    """Inside, the calls of these modules are made by `run`, after the user's hooks.

    For use inside `BatchStart.again`, where no watch stands there, and compiled modules run eagerly anyhow.
    """
    before = [(module, module.__dict__.get(ATTRIBUTE)) for module in modules]
    try:
        for module, _ in before:
            put(module, _StandIn(module, run))
        yield
    finally:
        for module, call in before:
            if isinstance(module.__dict__.get(ATTRIBUTE), _StandIn):
                put(module, call)
