"""What a re-run must not do a second time: act outside the process, or take a value that is given once.

A file that is written, a queue that is read: refused or discarded, and named with the program's line.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO, IOBase, StringIO
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue as ProcessQueue
from multiprocessing.queues import SimpleQueue as ProcessSimpleQueue
from queue import Queue, SimpleQueue
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..util.program_code import is_library

# Events of Python's audit hooks by which code acts outside the process. An `open` is looked at by its flags.
_EVENTS = frozenset({
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.kill", "os.killpg", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system",
    "subprocess.Popen", "shutil.move", "shutil.rmtree", "socket.bind", "socket.connect", "socket.sendto",
    "socket.sendmsg", "signal.pthread_kill", "sqlite3.connect",
})  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

COPIED_ITERATORS: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter("")),
    type(iter(range(0))),
    itertools.count,
    itertools.repeat,
)
_GIVE_ONCE: tuple[type, ...] = (
    types.GeneratorType,
    types.AsyncGeneratorType,
    types.CoroutineType,
    _BaseDataLoaderIter,
    Queue,
    SimpleQueue,
    ProcessQueue,
    ProcessSimpleQueue,
    Connection,
    socket.socket,
    IOBase,
)
# Modules of classes whose values act on a file or a process of their own.
_OF_OUTSIDE = frozenset({"sqlite3"})
# Of those whose values are memory that other processes see. A child has a copy of its own.
_OF_SHARED_MEMORY = frozenset({"multiprocessing.sharedctypes", "multiprocessing.shared_memory"})
# Methods of a file that take values, which lead nowhere in a child, and what tells of the file.
_TAKE = frozenset({"write", "writelines"})
_TELL = frozenset(
    {"flush", "fileno", "name", "mode", "closed", "close", "isatty", "encoding", "writable", "readable"}
)


_here = threading.local()
# Sentences on what a re-run wrote, where that went nowhere.
discarded: dict[str, None] = {}


class NotRepeatableError(RuntimeError):
    """Code that a re-run must not run a second time: it reads what gives each value once, or acts outside."""


def users_line(innermost: types.FrameType | None = None) -> str:
    """Return the innermost line of the program that is under way, here or at a frame, as "line 7 of train.py"."""
    frame = innermost = innermost or sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    found = innermost if is_library(frame.f_code.co_filename) else frame
    return f"line {found.f_lineno} of {found.f_code.co_filename}"


def discard(what: str) -> None:
    """Remember that the line under way wrote something that goes nowhere."""
    discarded[f"{users_line()} wrote to {what} once: what it wrote in a re-run was discarded"] = None


@contextmanager
def refused() -> Iterator[None]:
    """Refuse in this thread, by NotRepeatableError, what acts outside the process."""
    _add_hook()
    with _set(True):
        yield


@contextmanager
def allowed() -> Iterator[None]:
    """Allow it in the block: nanwatch writes files of its own."""
    with _set(False):
        yield


def is_refused() -> bool:
    """Return whether this thread must not act outside the process."""
    return getattr(_here, "is_refused", False)


@contextmanager
def _set(value: bool) -> Iterator[None]:
    before = is_refused()
    _here.is_refused = value
    try:
        yield
    finally:
        _here.is_refused = before


@cache
def _add_hook() -> None:
    # For good, as Python takes none away. A program whose batches never run again in its own process gets none.
    sys.addaudithook(_look)


def _look(event: str, args: tuple[Any, ...]) -> None:
    if not (event in _EVENTS or event == "open") or not is_refused():
        return
    if event == "open":
        path, _, flags = args
        if not isinstance(flags, int) or not flags & _WRITES or path == os.devnull or isinstance(path, int):
            return
        event = f"opens {path!r} to write"
    raise NotRepeatableError(f"{users_line()} acts outside the process ({event})")


_is_child = False


def in_child() -> bool:
    """Return whether this process is a child that re-runs batches; see child_process.py."""
    return _is_child


def enter_child() -> None:
    """Note that this process is one."""
    global _is_child
    _is_child = True


class GivesOnce:
    """Stand-in during a re-run for an iterator, queue, file or socket, whose values the batch has taken."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        if name in _TELL or (name in _TAKE and in_child()):
            if name in _TAKE:
                discard(repr(getattr(self._value, "name", "a file")))
            return getattr(self._value, name)
        raise self._refused()

    def _refuse(self, *_: Any) -> Any:
        raise self._refused()

    __iter__ = __next__ = __len__ = __getitem__ = __setitem__ = __enter__ = __exit__ = _refuse

    def _refused(self) -> NotRepeatableError:
        kind = type(self._value)
        what = f"takes a value from a {kind.__name__}, which gives each value once"
        if kind.__module__ in _OF_OUTSIDE | _OF_SHARED_MEMORY:
            what = f"uses a {kind.__name__}, whose changes outlast the process"
        return NotRepeatableError(f"{users_line()} {what}")


def repeatable(value: Any) -> Any:
    """Return the value, or a GivesOnce for one that a re-run must not read."""
    kind = type(value)
    if kind is tuple:
        parts = tuple(map(repeatable, value))
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    if isinstance(value, _GIVE_ONCE) and not isinstance(value, StringIO | BytesIO):
        return GivesOnce(value)
    if kind.__module__ in _OF_OUTSIDE or (kind.__module__ in _OF_SHARED_MEMORY and not in_child()):
        return GivesOnce(value)
    is_pythons = kind.__module__ in ("builtins", "itertools") and kind not in COPIED_ITERATORS
    return GivesOnce(value) if is_pythons and hasattr(kind, "__next__") else value
