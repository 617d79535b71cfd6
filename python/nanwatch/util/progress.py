"""A line on the terminal that says how far long work is, drawn by rich, and gone when the work is done.

Only a command shows it, by `shown`. What does the work is given a `Tell` and calls it; without one it calls `silent`.
The line is on stderr, so that stdout has no part in it. Without rich nothing is shown.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeAlias

from .visible import visible

# Callback for progress: what is being done, such as "reading a.parquet", and how much of it: `done` of `total` such
# units. `total` is None where it is not known.
Tell: TypeAlias = Callable[..., object]


def silent(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
    """Ignore the progress."""


@contextlib.contextmanager
def shown() -> Iterator[Tell]:
    """Show on stderr the progress of the block, where stderr is a terminal with colours.

    rich keeps what the block writes to sys.stderr meanwhile above the line. What is for a stdout that may be the same
    terminal has to wait for the block's end.
    """
    if sys.stderr is None or (console := color_console(sys.stderr)) is None:
        yield silent
        return
    from rich.progress import Progress, TextColumn

    column = TextColumn("{task.description}", markup=False)
    with Progress(column, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=None)

        def tell(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
            amount = f" {done:,} of {total:,} {unit}" if total else f" {done:,} {unit}" if done else ""
            progress.update(task, description=visible(what) + amount)

        yield tell


def color_console(file: TextIO) -> Any:
    """Return rich's console of a terminal that shows colours, by rich's judgement; None for others, or without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=file)
    return None if not console.is_terminal or console.no_color or console.color_system is None else console
