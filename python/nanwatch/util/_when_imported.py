"""Something to do as soon as a module is imported, which may be at once, later or never."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], object]) -> WhenImported | None:
    """Do `action` now if the module of that name is imported, else as soon as it is.

    Returns what can `cancel()` the waiting, or None when there is nothing to wait for.
    """
    if name in sys.modules:
        action()
        return None
    waiting = WhenImported(name, action)
    sys.meta_path.insert(0, waiting)
    return waiting


class WhenImported:
    """An entry of `sys.meta_path` that finds nothing itself, does its action once, and is gone."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action = action

    def cancel(self) -> None:
        """Wait no longer. A second time does nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Called by the import system for every module that is not imported yet."""
        if name != self._name:
            return None
        self.cancel()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._action()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
