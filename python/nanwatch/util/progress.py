"""Progress of long work, and the terminal that may show it.

What does the work is given a `Tell` and calls it; without one it calls `silent`. Only a command shows the progress.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO, TypeAlias

# Callback for progress: what is being done, such as "reading a.parquet", and how much of it: `done` of `total` such
# units. `total` is None where it is not known.
Tell: TypeAlias = Callable[..., object]


def silent(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
    """Ignore the progress."""


def color_console(file: TextIO) -> Any:
    """Return rich's console of a terminal that shows colours, by rich's judgement; None for others, or without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=file)
    return None if not console.is_terminal or console.no_color or console.color_system is None else console
