"""A line on the terminal that says how far long work is, drawn by rich, and gone when the work is done.

Only a command shows it, by `shown`. What does the work is given a `Tell` and calls it; without one it calls `silent`.
The line is on stderr, so that stdout has no part in it. Without rich nothing is shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from .visible import suppressing, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR = 20  # columns


class Tell(Protocol):
    """Callback for progress: what is being done, such as "reading a.parquet", and how much of it.

    `done` of `total` such `unit`s are done. `total` is None where it is not known. A call only stores its arguments, so
    a loop may make one for each step.
    """

    def __call__(self, what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        """Store the progress."""


def silent(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
    """Ignore the progress."""


@contextlib.contextmanager
def shown() -> Iterator[Tell]:
    """Show on stderr the progress of the block, where stderr is a terminal with colours and in the foreground.

    rich keeps what the block writes to sys.stderr meanwhile above the line. What is for a stdout that may be the same
    terminal has to wait for the block's end.
    """
    file = sys.stderr
    if file is None or not file.isatty() or not _is_in_foreground(file) or not wants_color(file):
        yield silent
        return
    line = _Line(file)
    try:
        line.start()
        yield line.tell
    finally:
        line.stop()


def _is_in_foreground(file: TextIO) -> bool:
    """Return whether the terminal is this job's own. One that is no job's has no other to disturb."""
    try:
        return os.tcgetpgrp(file.fileno()) == os.getpgrp()
    except OSError:
        return True


class _Line:
    def __init__(self, file: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._step: tuple[str, int, int | None, str] = ("", 0, None, "")
        self._console = Console(file=file)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            transient=True,
            refresh_per_second=10,
            redirect_stdout=False,
        )

    def tell(self, what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        self._step = (what, done, total, unit)

    def start(self) -> None:
        if self._console.is_interactive:
            with suppressing("a terminal that went away"):
                self._live.start()
                self._console.show_cursor(
                    True
                )  # a command that is killed leaves a terminal that can be typed at

    def stop(self) -> None:
        with suppressing("a terminal that went away"):
            self._live.stop()

    def _render(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        what, done, total, unit = self._step
        amount = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}" if done else ""
        row = Table.grid(padding=(0, 1))
        row.add_column()
        for _ in range(2):
            row.add_column(no_wrap=True, overflow="ellipsis")
        # rich's own bar is red, as non-finite records are.
        bar = ProgressBar(total, done, width=_BAR, complete_style="bar.finished", pulse_style="bar.finished")
        row.add_row(bar, Text(visible(what)), Text(amount))
        return row


def wants_color(file: TextIO) -> bool:
    """Return whether `file` is a terminal that shows colours, by rich's judgement; False without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return False
    console = Console(file=file)
    return console.is_terminal and not console.no_color and console.color_system is not None
