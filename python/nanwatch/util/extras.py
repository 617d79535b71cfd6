"""The packages that nanwatch works without, and what to install for what needs them."""

from __future__ import annotations

from importlib import import_module
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
