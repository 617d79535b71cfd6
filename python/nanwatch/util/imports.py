"""Optional packages: import one or say what to install, and act as soon as a module is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any


def needed(module: str, who: str, extra: str, instead: str = "") -> Any:
    """Import and return the module of that name. Raise ImportError, naming `who` needs its package, without it.

    `extra` is nanwatch's extra that has the package, with its version. `instead` is what there is without it, such as
    "leave color=False".
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        # A package that is there may lack one of its own.
        missing = error.name is None or error.name.partition(".")[0] == package
        why = "which is not installed" if missing else f"which could not be imported ({error})"
        # nanwatch itself is on no package index, so that `pip install 'nanwatch[...]'` would find nothing.
        raise ImportError(
            f"{who} needs the package `{package}`, {why}; pip install {package}, or in a clone of nanwatch"
            f" pip install --no-build-isolation '.[{extra}]'" + (f"; or {instead}" if instead else ""),
            name=package,
        ) from error


def when_imported(name: str, action: Callable[[], object]) -> Callable[[], None]:
    """Do `action` now if the module of that name is imported, else as soon as it is.

    Return a function that stops the waiting. It does nothing where there is nothing to wait for.
    """

    def find_spec(wanted: str, path: Any = None, target: ModuleType | None = None) -> Any:
        # The import system asks for each module that is new.
        if wanted != name:
            return None
        cancel()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                action()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def cancel() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    finder: Any = SimpleNamespace(find_spec=find_spec)
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, finder)
    return cancel
