"""Isolation of re-runs: a forked child process where one can be had, else this process, in both under a clock.

The child is a copy of the process at the moment of the failure, so what it runs changes neither the program's Python
state nor its tensors. Files, pipes and sockets that are open lead nowhere there. The child sends its result back over a
pipe. A parent that waits too long ends the child and goes on. CUDA does not survive a fork, and neither do macOS's
frameworks.

The clock ends a run that waits or loops, and notes at which line.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

import torch

from ..instrumentation.slot import waiting_ends
from ..util.program_code import is_library
from ..util.visible import spell

_HARD_PAUSE = 2  # omp_pause_hard
_PR_SET_PDEATHSIG = 1
# The parent acts on these, and a handler of the program's must not run twice.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGPIPE")
# Ends a run in the main thread: a wait for a lock lets a signal through. Ignored by default; Windows has none.
_ENDS_RUN: Any = getattr(signal, "SIGURG", None)


def can_fork() -> bool:
    """Return whether a re-run can have a process of its own.

    Not beside a CUDA device: after a backward, also of a model on the CPU, autograd refuses one in a forked child.
    """
    return sys.platform == "linux" and torch.cuda.device_count() == 0


class ChildEndedError(RuntimeError):
    """The child ended without a result. The text says why; `latest` is the last document that it sent, or None."""

    def __init__(self, reason: str, latest: Any) -> None:
        super().__init__(reason)
        self.latest = latest


# In the child: sends a document to the parent. In the program itself None.
_send: Callable[[Any], None] | None = None


def send(document: Any = None) -> None:
    """Send the parent what is known so far, and start its clock anew. Does nothing in the program itself."""
    if _send is not None:
        _send(document)


def is_child() -> bool:
    """Return whether this process is a forked child."""
    return _send is not None


def run_in_child(work: Callable[[], Any], seconds: float) -> Any:
    """Return the text or other plain document that `work` returns in a forked child.

    seconds: how long the child may go without a call of `send`.

    Raises ChildEndedError where no process can be had, or it takes longer or ends without a result, and what a signal
    handler of the program raises meanwhile, after the child has been ended.
    """
    drawn = random.getstate()  # which Python seeds anew in a child
    has_threads = _pause_openmp()
    reading, writing = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings(), reading:
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        parent = os.getpid()
        with writing:
            try:
                child = os.fork()
            except OSError as error:
                raise ChildEndedError(f"no process could be had: {error}", None) from None
            if child == 0:
                _be_child(work, parent, writing, drawn, has_threads)
        # A number may be another process's by now, where the program's own handler of SIGCHLD takes the status.
        process = os.pidfd_open(child)
        try:
            return _result(child, reading, seconds)
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
            os.close(process)


def _result(child: int, reading: Connection, seconds: float) -> Any:
    """Return the document after which the child says that it is done."""
    latest = None
    while reading.poll(seconds):
        try:
            document, is_last, error = reading.recv()
        except (EOFError, OSError):
            raise ChildEndedError(f"its process ended{_status(child)}", latest) from None
        if error:
            raise ChildEndedError(error, latest)
        if is_last:
            return document
        latest = latest if document is None else document
    raise ChildEndedError(f"it took longer than {seconds:.0f} s, and was ended", latest)


def _status(child: int) -> str:
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:
        return ""
    return f" by {signal.Signals(-code).name}" if code < 0 else f" with status {code}"


def _pause_openmp() -> bool:
    """End the threads of GNU OpenMP, which would be missing in a child. Return whether a child can have its own.

    They start again at the next parallel region. A child of a process that has not ended them waits for them for ever.
    Other makes of OpenMP see to a fork themselves.
    """
    return all(library.omp_pause_resource_all(_HARD_PAUSE) == 0 for library in _gnu_openmp())


@cache
def _gnu_openmp() -> tuple[ctypes.CDLL, ...]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        files = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "libgomp" in line}
    return tuple(ctypes.CDLL(file) for file in sorted(files))


def _be_child(
    work: Callable[[], Any], parent: int, writing: Connection, drawn: Any, has_threads: bool
) -> NoReturn:
    global _send
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _cut_off(writing.fileno())
        random.setstate(drawn)
        if not has_threads:
            torch.set_num_threads(1)

        _send = lambda document: writing.send((document, False, ""))  # noqa: E731
        try:
            writing.send((work(), True, ""))
        except BaseException as error:
            writing.send((None, True, f"it raised {spell(error)}"))
    finally:
        os._exit(0)


def _cut_off(kept: int) -> None:
    """Let all files, pipes and sockets lead nowhere: what is written is lost, and a read raises OSError."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        if int(name) != kept:
            with suppress(OSError):  # of the listing itself
                os.fstat(int(name))
                os.dup2(nowhere, int(name))


class RerunEndedError(Exception):
    """The clock has ended a re-run. The text says where."""


class _End(BaseException):
    """Leaves the code of the program that is run again."""


class Clock:
    """Time limit of each re-run of one failure, in this thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended = ""
        self._is_armed = False
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        # Only the main thread gets signals, and a handler of the program's stays.
        is_main = threading.current_thread() is threading.main_thread()
        is_free = is_main and _ENDS_RUN and signal.getsignal(_ENDS_RUN) in (signal.SIG_DFL, signal.SIG_IGN)
        self._signal = _ENDS_RUN if is_free else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Give the block its time. Raises RerunEndedError where it takes longer, or an earlier block did."""
        if self._ended:
            raise RerunEndedError(self._ended)
        self._end_waiting = waiting_ends()
        timer = threading.Timer(self._seconds, self._strike)
        timer.daemon = True
        before = None if self._signal is None else signal.signal(self._signal, self._at_signal)
        try:
            try:
                self._is_armed = True
                timer.start()
                yield
            finally:
                self._is_armed = False  # before it waits, so that the handler raises nothing here
                with self._lock:
                    timer.cancel()
                if self._signal is not None:
                    signal.signal(self._signal, before)
        except _End:  # also one that came as the block was left
            raise RerunEndedError(self._ended) from None

    def _strike(self) -> None:
        """End the block, from the timer's thread."""
        with self._lock:
            if not self._is_armed:
                return
            where = _line(sys._current_frames().get(self._thread))
            self._ended = f"it took longer than {self._seconds:.0f} s at {where}, and was ended"
            # Code that the end passes through, as an executor's `with`, may wait for a thread of its own.
            self._end_waiting()
            if self._signal is not None:
                signal.pthread_kill(self._thread, self._signal)
            else:
                # Where this thread waits for a lock, the error comes with the lock: no signal reaches the thread.
                self._is_armed = False
                thread = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_End))

    def _at_signal(self, *_: Any) -> None:
        if self._is_armed and self._ended:
            self._is_armed = False
            raise _End


def _line(frame: FrameType | None) -> str:
    """Return the innermost line of the program at a frame, as "line 7 of train.py"."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"line {frame.f_lineno} of {frame.f_code.co_filename}"


current: Clock | None = None


@contextmanager
def clock(seconds: float) -> Iterator[None]:
    """Give each re-run in the block a clock of this many seconds."""
    global current
    before, current = current, Clock(seconds)
    try:
        yield
    finally:
        current = before
