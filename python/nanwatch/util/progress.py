"""A line on the terminal that says how far long work is, and that goes when the work is done.

Only a command shows it, by `shown`. What does the work is given a `Tell` and calls it; without one it calls `silent`.
rich draws the line on stderr, and stdout has no part in it. The cursor is never hidden, so that a command which is
killed leaves a terminal that can be typed at.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO, cast

from .suppressed import suppressed, suppressing
from .visible import visible, wants_color

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

DELAY = 0.5  # seconds; what is done sooner shows nothing
_PERIOD = 0.1  # seconds from one drawing to the next
_BAR = 20  # columns


class Tell(Protocol):
    """Is told what is being done, such as "reading a.parquet", and how much of it: `done` of `total` such `unit`s.

    It keeps what it is told and no more, so a loop may call it each time. `total` is None where it is not known.
    """

    def __call__(self, what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        """Keep it."""


def silent(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
    """A Tell that tells nobody."""


@contextlib.contextmanager
def shown() -> Iterator[Tell]:
    """What the block tells is shown on stderr from DELAY seconds on, and is gone at the block's end.

    Nothing at all is written where stderr is no terminal in which rich shows colours, or without rich. What the block
    writes to sys.stderr meanwhile stays, as it is, and the line comes again below it; what is for a stdout that may be
    the same terminal has to wait for the block's end.
    """
    file = sys.stderr
    if file is None or not file.isatty():
        yield silent
        return
    line = _Line(file)
    beside = cast("TextIO", _Beside(file, line))
    try:
        sys.stderr = beside
        line.start()
        yield line.tell
    finally:
        line.end()
        if sys.stderr is beside:  # and not what the block put there and left
            sys.stderr = file


class _Step(NamedTuple):
    what: str
    done: int
    total: int | None
    unit: str


class _Line:
    """The line: a thread draws it, and whoever writes to sys.stderr takes it away first."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._step: _Step | None = None
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nanwatch-progress", daemon=True)
        self._pid = os.getpid()
        self._written_at = -inf
        self._has_room = True  # the cursor is at the start of an empty line, as far as is known

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # where no more threads may be had there is no line
            self._thread.start()

    def tell(self, what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        self._step = _Step(what, done, total, unit)

    def end(self) -> None:
        """Take it away for good."""
        if os.getpid() == self._pid:
            self._ended.set()
            if self._thread.ident is not None:
                self._thread.join()

    def write(self, text: str) -> int:
        """Write what somebody else has to say."""
        if os.getpid() != self._pid:  # a forked child has no thread that would give the lock back
            return self._file.write(text)
        with self._lock:
            self._erase()
            if text:
                self._has_room = text.endswith("\n")
                self._written_at = monotonic()
            return self._file.write(text)

    def _serve(self) -> None:
        if self._ended.wait(DELAY):
            return
        try:
            # Not before: rich takes 0.1 s to be imported, and only long work is to wait for it.
            if not wants_color(self._file):
                return
            while not self._ended.is_set():
                with self._lock:
                    self._draw()
                self._ended.wait(_PERIOD)
        except Exception:  # the work is what matters, and goes on
            suppressed("no rich, or a terminal that went away")
        finally:
            with self._lock:
                self._erase()

    def _draw(self) -> None:
        if self._step is None:
            return
        if not _is_in_foreground(self._file):
            self._erase()
            return
        if self._live is None:
            # What is written a piece at a time, such as a bar of the user's own, is left alone until it pauses.
            if not self._has_room or monotonic() - self._written_at < DELAY:
                return
            self._live = _new_live(self._file, self._render)
            self._live.start()
        self._live.refresh()

    def _erase(self) -> None:
        live, self._live = self._live, None
        # In the background it is left where it is: the shell has gone on below, and that would be erased.
        if live is not None and _is_in_foreground(self._file):
            with suppressing("a terminal that went away"):
                live.stop()

    def _render(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        assert self._step is not None
        what, done, total, unit = self._step
        amount = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}" if done else ""
        row = Table.grid(padding=(0, 1))
        row.add_column()
        for _ in range(2):
            row.add_column(no_wrap=True, overflow="ellipsis")
        # rich's own bar is red, as faults are.
        bar = ProgressBar(total, done, width=_BAR, complete_style="bar.finished", pulse_style="bar.finished")
        row.add_row(bar, Text(visible(what)), Text(amount))
        return row


class _Beside:
    """sys.stderr while there is a line."""

    def __init__(self, file: TextIO, line: _Line) -> None:
        self._file = file
        self._line = line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        return self._line.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))


def _new_live(file: TextIO, render: Callable[[], Table]) -> Live:
    from rich.console import Console
    from rich.live import Live

    class SteadyConsole(Console):
        """One in which the cursor stays visible."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    return Live(
        get_renderable=render,
        console=SteadyConsole(file=file),
        auto_refresh=False,
        transient=True,
        # It would take sys.stderr and sys.stdout as they are in the middle of the work, and wrap lines.
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _is_in_foreground(file: TextIO) -> bool:
    """Whether the terminal is this job's own now. One that is no job's has no other to disturb."""
    try:
        return os.tcgetpgrp(file.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # ValueError: of a file that is closed
        return True
