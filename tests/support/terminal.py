"""A terminal for tests: a pseudo-terminal whose other end is read, and a screen that does what a terminal would."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

# Variables by which rich judges a terminal; a test starts from a plain one.
VARIABLES = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
COLUMNS = 80
_TOKEN = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|([\r\n])|([^\x00-\x1f\x7f]+)|(.)", re.DOTALL)


@dataclass
class Screen:
    """Screen of a terminal after some bytes. An unknown escape sequence is an error.

    A line that is wider than the terminal is one line here, so it must not be erased.

    `erased` has the lines that were taken away again, as they were.
    """

    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    column: int = 0
    is_cursor_visible: bool = True
    erased: list[str] = field(default_factory=list)

    @classmethod
    def after(cls, written: bytes) -> Screen:
        """A fresh one after these bytes."""
        screen = cls()
        for mark, numbers, letter, move, text, other in _TOKEN.findall(written.decode()):
            if other:
                raise AssertionError(f"an unknown control character {other!r} in {written!r}")
            if letter:
                screen.control(mark + numbers + letter)
            elif move:
                screen.move(move)
            else:
                screen.put(text)
        return screen

    def control(self, what: str) -> None:
        """Do the control sequence that follows `ESC [`."""
        if what in ("?25l", "?25h"):
            self.is_cursor_visible = what == "?25h"
        elif what == "2K":
            if line := self.lines[self.row]:
                assert len(line) < COLUMNS, f"it takes more than one line of the terminal: {line!r}"
                self.erased.append(line)
            self.lines[self.row] = ""
        elif what.endswith("A"):
            self.row = max(0, self.row - int(what[:-1] or 1))
        elif not what.endswith("m"):
            raise AssertionError(f"an unknown sequence ESC [ {what}")

    def move(self, what: str) -> None:
        """A carriage return or a new line."""
        if what == "\r":
            self.column = 0
            return
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def put(self, text: str) -> None:
        """Text that stays on its line."""
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)

    @property
    def text(self) -> str:
        """All that is left on it."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    @property
    def is_whole(self) -> bool:
        """Return whether the next thing to be written would stand at the start of an empty line, with a cursor."""
        return self.is_cursor_visible and self.column == 0 and not self.lines[self.row]


class Terminal:
    """A pseudo-terminal. `file` is its end for the program, in text; `written` grows with what the program writes."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.file: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self.written = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._gone = threading.Event()
        self._thread.start()

    def _read(self) -> None:
        while not self._gone.is_set():
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                part = os.read(self._master, 65536)
            except OSError:  # the last of the program's ends was closed
                return
            if not part:
                return
            self.written += part

    def hang_up(self) -> None:
        """Hang up, as a terminal does when its window is closed."""
        self._gone.set()
        self._thread.join()
        os.close(self._master)
        self._master = -1

    def close(self) -> Screen:
        """Close it and return the screen at the end."""
        if not self.file.closed:
            self.file.close()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the program's end of the terminal is still open"
        if self._master >= 0:
            os.close(self._master)
            self._master = -1
        return Screen.after(self.written)


def on_terminal(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    at: Callable[[bytes, subprocess.Popen[bytes]], object] = lambda written, process: None,
    timeout: float = 120,
) -> tuple[int, bytes, Terminal]:
    """Status, stdout and the terminal of a program that has it as its own and as stderr; stdout is a pipe.

    `at` is called again and again with what was written so far.
    """
    terminal = Terminal()

    def make_it_its_own() -> None:
        os.setsid()
        # A shell script's `make test &` ignores Ctrl-C, and its children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)

    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal.file,
        env={**plain, "TERM": "xterm-256color", **environment},
        preexec_fn=make_it_its_own,
    )
    terminal.file.close()
    printed: list[bytes] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: printed.append(process.stdout.read()), daemon=True)
    reader.start()
    try:
        end = time.monotonic() + timeout
        while process.poll() is None:
            at(terminal.written, process)
            time.sleep(0.02)
            assert time.monotonic() < end, f"it has not ended; so far: {terminal.written!r}"
    finally:
        process.kill()
        process.wait()
    reader.join(10)
    return process.returncode, printed[0], terminal
