"""The packages that an integration is for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def needed(module: str, extra: str) -> Any:
    """The module of that name. Raises ImportError, naming the extra that has its package."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        missing = error.name == package
        why = "which is not installed" if missing else f"which could not be imported ({error})"
        raise ImportError(
            f"nanwatch.integrations.{extra} needs the package `{package}`, {why};"
            f" pip install 'nanwatch[{extra}]'",
            name=package,
        ) from error
