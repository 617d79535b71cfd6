"""Time limit of each step: a process that hangs, also inside a native call, reports where and ends.

Python cannot interrupt a native call that waits for the network, so a thread watches the clock and ends the process
with `os._exit`. A native call that holds the interpreter's lock stops that thread too. For this case `faulthandler`,
whose timer needs no Python, writes the stack to stderr and ends the process.
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

from ..util.suppressed import suppressing
from ..util.visible import spell

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TICK = 0.1  # seconds between two checks of the clock
GRACE = 2.0  # seconds from the news of another rank's failure to the end of this one: its own error says more
LAST_RESORT = 15.0  # seconds after the timeout; the clock's own work takes less than 10
_SOURCE_PLACE = re.compile(r"\[/\S+:\d+\] ")  # of torch's build machine


class StepError(RuntimeError):
    """A step failed; the message says how."""


class LinkError(StepError):
    """This rank cannot reach others. That is its own trouble, also when another rank has failed before."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Step that failed, and the reason. `follows`: it only waited for a rank that had failed before."""

    step: str
    why: str
    follows: bool = False


class Guard:
    """Clock over the steps. The first trouble, in any thread, calls `on_trouble` and ends the process with status 1.

    Make it in the main thread. From then on SIGTERM and SIGINT are troubles too: torchrun sends SIGTERM to all ranks of
    a node when one of them has failed.
    """

    def __init__(self, timeout: float, on_trouble: Callable[[Trouble], None]) -> None:
        self._timeout = timeout
        self._on_trouble = on_trouble
        self._news: tuple[float, str, bool] | None = None
        self._stopped = False
        self._ending = threading.Lock()
        self._restart("start")
        # The C part of a handler writes to this pipe at once, also while the main thread is in a native call.
        self._signals, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: None)
        self._thread = threading.Thread(target=self._watch, name="netcheck clock", daemon=True)
        self._thread.start()

    def _restart(self, step: str, detail: str = "") -> None:
        self._step, self._detail, self._deadline = step, detail, time.monotonic() + self._timeout
        faulthandler.dump_traceback_later(self._timeout + LAST_RESORT, exit=True)

    @property
    def remaining(self) -> float:
        """Seconds until the step must have ended."""
        return max(0.0, self._deadline - time.monotonic())

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Restart the clock for a step, and end the process if it raises."""
        self._restart(name)
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, StepError) else _SOURCE_PLACE.sub("", spell(error))
            self.fail(why, is_own=isinstance(error, LinkError))

    def tick(self, detail: str) -> None:
        """Restart the clock for the next part of the step, named by `detail`."""
        self._restart(self._step, detail)

    def hear(self, news: str, follows: bool) -> None:
        """End the process within GRACE seconds. `follows`: another rank has reported its failure."""
        self._news = self._news or (time.monotonic(), news, follows)

    def fail(self, why: str, *, is_own: bool = False) -> None:
        """End the process with the trouble; does not return. It follows from news of another's, unless it `is_own`."""
        if self._ending.acquire(blocking=False):
            follows = self._news is not None and self._news[2] and not is_own
            if self._news is not None and self._news[1] not in why:
                why = f"{why}; {self._news[1]}"
            with suppressing("the trouble of a step could not be told"):
                self._on_trouble(
                    Trouble(self._step, f"{self._detail}: {why}" if self._detail else why, follows)
                )
            os._exit(1)
        threading.Event().wait()  # the thread that was first ends the process

    def stop(self) -> None:
        """Stop the clock and reset the signals after the last step."""
        self._stopped = True
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _watch(self) -> None:
        while not self._stopped:
            if select.select([self._signals], [], [], _TICK)[0]:
                self.fail(f"stopped by {signal.Signals(os.read(self._signals, 1)[0]).name}")
            now = time.monotonic()
            if now > self._deadline and not self._stopped:
                self.fail(f"no answer within {self._timeout:g} s")
            if self._news is not None and now > self._news[0] + GRACE and not self._stopped:
                self.fail(self._news[1])
