"""The log of a run: what a watch sees, told to the user's own tracker, seldom, and without ever harming the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from ..report.errors import spell
from ..report.finding import Finding
from ..report.frame import FrameRows
from ..util.user_warning import warn_user
from .forecast import Forecast
from .log_entry import BatchLog, LogEntry, fault_entry
from .sink import Sink

# A tracker takes 30 to 60 µs a number. Where the entries of a model would take more than a fiftieth of the run's time,
# there are fewer of them.
_SHARE = 50
# Curves by module. Of a larger model those have one that were among the worst when there still was room.
_MOST_MODULES = 256


class Log:
    """Logs the batches to a sink: every so many, or fewer where that takes too long, and each fault.

    What the sink raises is one warning and the end of the log. `every` is in batches.
    """

    def __init__(self, sink: Sink, every: int) -> None:
        self._sink: Sink | None = sink
        self._every = every
        self._next = 0
        self._not_before = 0.0
        # Settled between batches: one whose first frames were not taken is not logged by its last.
        self._has_time = True
        # The first entry opens a file, or imports a package: it says nothing of the others.
        self._is_warm = False
        self._batch = BatchLog(-1)
        self._modules: dict[str, None] = {}
        self._told_of: int | None = None  # the latest batch that was logged as faulty
        # A forked child has the tracker but not its thread: what is put in its queue would stay there, and block.
        self._process = os.getpid()

    def is_due(self, batch: int) -> bool:
        """Whether the frames of this batch are wanted."""
        return self._sink is not None and self._has_time and batch >= self._next

    def add(self, frame: FrameRows) -> None:
        """Take a frame of the batch that is under way; those of one that went wrong are dropped with the next."""
        # Each thread adds to what is of its own batch, and no other is read at that batch's end.
        own = self._batch
        if own.batch != frame.batch:
            own = self._batch = BatchLog(frame.batch)
        own.add(frame)

    def end(self, batch: int, forecasts: Sequence[Forecast]) -> None:
        """The batch is done, and all was finite: log it if its frames were taken, and the forecasts in any case."""
        taken, self._batch = self._batch, BatchLog(-1)
        if taken.batch == batch:
            self._next = batch + self._every
            self._write(lambda: self._entry(taken, forecasts))
        elif forecasts:
            self._write(lambda: BatchLog(batch).entry((), forecasts))
        self._has_time = monotonic() >= self._not_before

    def fault(self, finding: Finding) -> None:
        """A batch went wrong. Of faulty ones in a row no more are told than of others."""
        last = self._told_of
        if last is not None and last <= finding.batch < last + self._every:
            return
        self._told_of = finding.batch
        # What is raised next may end the process.
        self._write(lambda: fault_entry(finding), flushes=True)

    def close(self) -> None:
        """Log no more. The user's own tracker stays open. A second time does nothing."""
        sink, self._sink = self._sink, None
        if sink is not None and self._process == os.getpid():
            with self._safely():
                sink.close()

    def _entry(self, taken: BatchLog, forecasts: Sequence[Forecast]) -> LogEntry:
        for name in taken.headroom:
            if len(self._modules) >= _MOST_MODULES:
                break
            self._modules[name] = None
        return taken.entry(self._modules, forecasts)

    def _write(self, make: Callable[[], LogEntry], *, flushes: bool = False) -> None:
        sink = self._sink
        if sink is None or self._process != os.getpid():
            return
        begun = monotonic()
        with self._safely():
            sink.write(make())
            if flushes:
                sink.flush()
        ended = monotonic()
        if self._is_warm:
            self._not_before = ended + _SHARE * (ended - begun)
        self._is_warm = True

    @contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._sink = None
            warn_user(
                f"nanwatch logs no more to log_to=, which raised {spell(error)}; the run goes on and is watched"
            )
