"""Clock of re-runs, which ends one that waits or loops."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..util.program_code import is_library

# Ends a run in the main thread: a wait for a lock lets a signal through. Ignored by default.
_ENDS_RUN = getattr(signal, "SIGURG", None)  # Windows has none


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
        is_main = threading.current_thread() is threading.main_thread()
        is_free = _ENDS_RUN is not None and signal.getsignal(_ENDS_RUN) in (signal.SIG_DFL, signal.SIG_IGN)
        self._signal = _ENDS_RUN if is_main and is_free else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Give the block its time. Raises RerunEndedError where it takes longer, or an earlier block did."""
        if self._ended:
            raise RerunEndedError(self._ended)
        timer = threading.Timer(self._seconds, self._strike)
        timer.daemon = True
        before = None if self._signal is None else signal.signal(self._signal, self._at_signal)
        try:
            self._is_armed = True
            timer.start()
            yield
        except _End:
            raise RerunEndedError(self._ended) from None
        finally:
            self._is_armed = False  # before it waits, so that the handler raises nothing here
            with self._lock:
                timer.cancel()
            if self._signal is not None:
                signal.signal(self._signal, before)

    def _strike(self) -> None:
        with self._lock:
            if not self._is_armed:
                return
            where = _line(sys._current_frames().get(self._thread))
            self._ended = f"it took longer than {self._seconds:.0f} s at {where}, and was ended"
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
