"""Links that make the calls of some modules for a time."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from .links import Link, attach, detach

# Makes the call of a module, as `module._call_impl(*args, **kwargs)` would.
Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class StandIn(Link):
    """A link that stands before a module's call until the end of a `with` block; it keeps the module alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.inner: Any = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call through `run`."""
        return self.run(self._module, args, kwargs)

    @abstractmethod
    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the module's call."""

    def run_inner(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make it as if this did not stand there."""
        return (module._call_impl if self.inner is None else self.inner)(*args, **kwargs)


@contextmanager
def before_calls(links: Iterable[StandIn]) -> Iterator[None]:
    """Inside, these links stand before the calls of their modules."""
    attached: list[StandIn] = []
    try:
        for link in links:
            attached.append(link)
            attach(link._module, link)
        yield
    finally:
        for link in attached:
            detach(link._module, link)


class _OfThisThread(StandIn):
    """Makes the calls of the thread that made it through a function; those of others unseen."""

    def __init__(self, module: nn.Module, run: Run) -> None:
        super().__init__(module)
        self._run = run
        self._thread = threading.get_ident()

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        own = threading.get_ident() == self._thread
        return (self._run if own else self.run_inner)(module, args, kwargs)


def stand_in(modules: Iterable[nn.Module], run: Run) -> AbstractContextManager[None]:
    """A context inside which `run` makes the calls of these modules that this thread makes, after the user's hooks.

    For use inside `BatchSnapshot.again`, where no watch records anything, and compiled modules run eagerly anyhow.
    """
    return before_calls(_OfThisThread(module, run) for module in {id(one): one for one in modules}.values())
