"""Re-runs in the program's own process, where a child cannot be had: with a clock, and signals that keep their meaning.

A signal's handler that raises ends the re-run, and what it raised is raised again when the finding is complete. A run
that takes too long is ended. Code that would act outside the process, or read what gives each value once, is refused
before it does so.
"""

from __future__ import annotations

import ctypes
import inspect
import multiprocessing.connection
import multiprocessing.queues
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from io import IOBase
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..util.program_code import is_library
from . import outside
from .outside import NotRepeatableError, users_line

# Ends a run in the main thread; a lock that the run waits for lets a signal through. Ignored by default.
_ENDS_RUN = signal.SIGURG
_WRITES = frozenset({"write", "writelines", "truncate"})
_READS = frozenset({"read", "readline", "readlines", "read1", "readinto"})
_ROWS = frozenset({"writerow", "writerows"})  # of a csv.writer, which writes past Python
_CHANNELS = frozenset(
    {"get", "put", "get_nowait", "put_nowait", "send", "sendall", "sendto", "recv", "recv_into"}
)
_REFUSED_CODES = {
    inspect.unwrap(function).__code__: what
    for what, functions in {
        "takes from or gives to a queue": (
            queue.Queue.get,
            queue.Queue.put,
            multiprocessing.queues.Queue.get,
            multiprocessing.queues.Queue.put,
        ),
        "talks to another process": (
            multiprocessing.connection.Connection.send,
            multiprocessing.connection.Connection.recv,
        ),
        "takes a batch from a DataLoader": (_BaseDataLoaderIter.__next__,),
        "writes a file": (torch.serialization._open_zipfile_writer_file.__init__,),
        # What nanwatch itself runs backwards changes no `.grad`.
        "changes gradients": (torch.Tensor.backward, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad),
    }.items()
    for function in functions
}
_OF_DESCRIPTORS = frozenset(
    getattr(os, name)
    for name in ("read", "readv", "pread", "write", "writev", "pwrite", "sendfile", "splice", "ftruncate")
    if hasattr(os, name)
)


class RerunEndedError(Exception):
    """A re-run was ended: by its clock, or by a signal. The text says which."""


class _End(BaseException):
    """Leaves the code of the program that is run again."""


class Examination:
    """Re-runs of one failure in this process and thread. `interrupt` is what a signal's handler has raised."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.interrupt: BaseException | None = None
        self._ended = ""
        self._is_armed = False
        self._thread = threading.get_ident()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run code of the program in the block: at most `seconds`, and nothing that acts outside.

        Raises RerunEndedError where the block is ended, or an earlier one of this examination was.
        """
        if self._ended:
            raise RerunEndedError(self._ended)
        timer = threading.Timer(self.seconds, self._time_is_up)
        timer.daemon = True
        timer.name = "nanwatch clock of a re-run"
        try:
            with ExitStack() as after:
                after.enter_context(_refusing())
                after.callback(self._disarm)
                self._is_armed = True
                timer.start()
                yield
        except _End:
            raise RerunEndedError(self._ended) from None
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            raise RerunEndedError(f"it raised {type(error).__name__}") from None
        finally:
            timer.cancel()

    def signals_kept(self) -> AbstractContextManager[None]:
        """Keep what handlers of the program raise in the block, and let them and the clock end a run."""
        return _handlers_replaced(self._deferring, self._at_signal)

    def _disarm(self) -> None:
        self._is_armed = False

    def _time_is_up(self) -> None:
        if not self._is_armed:
            return
        where = users_line(sys._current_frames().get(self._thread))
        self._ended = f"it took longer than {self.seconds:.0f} s at {where}, and was ended"
        if self._thread == threading.main_thread().ident:
            signal.pthread_kill(self._thread, _ENDS_RUN)
        else:
            # Not where it waits for a lock: no signal reaches this thread.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_End))

    def _at_signal(self, *_: Any) -> None:
        if self._is_armed and self._ended:
            self._is_armed = False
            raise _End

    def _deferring(self, handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        """Call the program's handler, and keep what it raises until the finding is complete."""
        try:
            handler(number, frame)
        except BaseException as error:
            self.interrupt = self.interrupt or error
            self._ended = f"{signal.Signals(number).name} ended it"
            if self._is_armed:
                self._is_armed = False
                raise _End from None


current: Examination | None = None


@contextmanager
def examination(seconds: float) -> Iterator[Examination]:
    """Give the re-runs in the block a clock of this many seconds each, and keep what handlers of signals raise."""
    global current
    before, current = current, Examination(seconds)
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with current.signals_kept() if is_main else nullcontext():
            yield current
    finally:
        current = before


@contextmanager
def _handlers_replaced(deferring: Callable[..., None], ends: Callable[..., None]) -> Iterator[None]:
    handlers: dict[int, Any] = {}
    for number in map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}):
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
    own = signal.getsignal(_ENDS_RUN)
    try:
        for number, handler in handlers.items():
            signal.signal(number, lambda n, frame, handler=handler: deferring(handler, n, frame))  # type: ignore[misc]
        if own in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(_ENDS_RUN, ends)
        yield
    finally:
        for number, handler in {**handlers, int(_ENDS_RUN): own}.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse in this thread what acts outside the process, before it does."""
    before, consoles = sys.getprofile(), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = map(_Muted, consoles)
    try:
        with outside.refused():
            sys.setprofile(_look)
            try:
                yield
            finally:
                sys.setprofile(before)
    finally:
        sys.stdout, sys.stderr = consoles


class _Muted:
    """A console, without what a re-run prints once more."""

    def __init__(self, console: Any) -> None:
        self._console = console

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)

    def write(self, text: str) -> int:
        """Write what other threads print."""
        return len(text) if outside.is_refused() else self._console.write(text)


def _look(frame: FrameType, event: str, called: Any) -> None:
    if event == "call":
        if (what := _REFUSED_CODES.get(frame.f_code)) is not None:
            raise NotRepeatableError(f"{users_line()} {what}")
    elif event == "c_call":
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        # Python reads source files for tracebacks.
        is_read = name in _READS and not is_library(frame.f_code.co_filename)
        if (is_read or name in _WRITES) and isinstance(owner, IOBase) and not _is_console(owner):
            raise NotRepeatableError(f"{users_line()} reads or writes a file")
        if called in _OF_DESCRIPTORS or name in _ROWS:
            raise NotRepeatableError(f"{users_line()} reads or writes a file")
        if name in _CHANNELS and isinstance(owner, queue.SimpleQueue | socket.socket):
            raise NotRepeatableError(f"{users_line()} uses a {type(owner).__name__}")


def _is_console(file: Any) -> bool:
    """Return whether the file is stdout or stderr, or is only memory."""
    try:
        return bool(file.fileno() <= 2)
    except (OSError, ValueError):
        return True
