"""The clock over each step: a process that hangs, also inside a native call, says where and ends.

A native call that waits for the network cannot be interrupted, so the clock is a thread of its own, and it ends the
process with `os._exit`. A native call that also holds the interpreter's lock would stop that thread too; behind it
stands `faulthandler`, whose timer needs no Python: it writes the stack to stderr and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..report.errors import spell
from ..util.suppressed import suppressing

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TICK = 0.1  # seconds between two looks at the clock
GRACE = 2.0  # seconds from the news of another rank's failure to the end of this one: its own error says more
_SOURCE_PLACE = re.compile(r"\[/\S+:\d+\] ")  # of torch's build machine
LAST_RESORT = 15.0  # seconds after the timeout; what the clock has to do takes less than 10


class StepError(RuntimeError):
    """A step failed; the text says how."""


class LinkError(StepError):
    """Of ranks that this one cannot reach: its own trouble, also when another rank has failed before.

    A rank that has told of its failure still answers while the others end.
    """


@dataclass(frozen=True, slots=True)
class Trouble:
    """The step that failed and why, in words; `follows` when it only waited for a rank that had failed before."""

    step: str
    why: str
    follows: bool = False


class Guard:
    """Runs steps under a clock. `on_trouble` is called once, in whatever thread saw the first trouble; then the process
    ends with status 1.

    Make it in the main thread. SIGTERM and SIGINT are troubles too from then on: torchrun sends the first to all ranks
    of a node when one of them has ended badly.
    """

    def __init__(self, timeout: float, on_trouble: Callable[[Trouble], None]) -> None:
        self._timeout = timeout
        self._on_trouble = on_trouble
        self._step = "start"
        self.detail = ""
        self._deadline = time.monotonic() + timeout
        self._news: tuple[float, str, bool] | None = None
        self._stopped = False
        self._ending = threading.Lock()
        self._signals, self._signals_end = os.pipe()
        os.set_blocking(self._signals_end, False)
        # The C part of a handler writes to this pipe at once, also while the main thread is in a native call.
        signal.set_wakeup_fd(self._signals_end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: None)
        self._thread = threading.Thread(target=self._watch, name="netcheck clock", daemon=True)
        self._thread.start()

    @property
    def remaining(self) -> float:
        """Seconds until the step must have ended."""
        return max(0.0, self._deadline - time.monotonic())

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step: the clock starts anew, and an exception inside it is its trouble."""
        self._deadline, self._step, self.detail = time.monotonic() + self._timeout, name, ""
        faulthandler.dump_traceback_later(self._timeout + LAST_RESORT, exit=True)
        try:
            yield
        except Exception as error:
            self.fail(_words(error), is_own=isinstance(error, LinkError))

    def tick(self, detail: str) -> None:
        """The step goes on with its next part, named by `detail`: the clock starts anew."""
        self.detail = detail
        self._deadline = time.monotonic() + self._timeout
        faulthandler.dump_traceback_later(self._timeout + LAST_RESORT, exit=True)

    def hear(self, news: str, follows: bool) -> None:
        """This rank will not get far: end within GRACE seconds. `follows` where another rank has told why."""
        if self._news is None:
            self._news = (time.monotonic(), news, follows)

    def fail(self, why: str, *, is_own: bool = False) -> None:
        """End the process with the trouble; does not return. It follows from news of another's, unless it `is_own`."""
        if self._ending.acquire(blocking=False):
            follows = self._news is not None and self._news[2] and not is_own
            if self._news is not None and self._news[1] not in why:
                why = f"{why}; {self._news[1]}"
            if self.detail:
                why = f"{self.detail}: {why}"
            with suppressing("the trouble of a step could not be told"):
                self._on_trouble(Trouble(self._step, why, follows))
            os._exit(1)
        threading.Event().wait()  # the thread that was first ends the process

    def stop(self) -> None:
        """No step comes any more: the clock ends and signals are what they were by default."""
        self._stopped = True
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._signals)
        os.close(self._signals_end)

    def _watch(self) -> None:
        while not self._stopped:
            readable, _, _ = select.select([self._signals], [], [], _TICK)
            if readable:
                number = os.read(self._signals, 1)[0]
                self.fail(f"stopped by {signal.Signals(number).name}")
            now = time.monotonic()
            if now > self._deadline and not self._stopped:
                self.fail(f"no answer within {self._timeout:g} s")
            if self._news is not None and now > self._news[0] + GRACE and not self._stopped:
                self.fail(self._news[1])


def _words(error: Exception) -> str:
    if isinstance(error, StepError):
        return str(error)
    return _SOURCE_PLACE.sub("", spell(error))
