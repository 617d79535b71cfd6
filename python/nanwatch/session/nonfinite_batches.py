"""Non-finite batches of a watch: their reports, and the warnings of `on_nonfinite="warn"`."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field

from ..report import text
from ..report.errors import NonFiniteError
from ..report.finding import Finding
from ..report.report import Report
from ..util.user_warning import warn_user
from ..util.visible import module_name

# Batches that have ended and are known to be non-finite, for their backwards and their recomputations.
_MAX_ENDED = 64
# Modules named in one line.
_MAX_NAMED = 3


@dataclass(slots=True)
class NonFiniteBatch:
    """A batch under way from its first non-finite value on. It belongs to the thread that makes the batch.

    `report` is of that value. `is_told` says that it was raised or handed to the user's function, `is_left` that the
    thread had ended the batch before its rows came from the device. `raised` is the error that was raised inside the
    forward, until the forward is left.
    """

    report: Report
    is_left: bool = False
    is_told: bool = False
    raised: NonFiniteError | None = None


class NonFiniteBatches:
    """The non-finite batches under way, at most one for each thread, and the latest that have ended, by their numbers.

    `failure` is the report of the first of the latest run of such batches. The run is open until a batch is finite.
    """

    def __init__(self) -> None:
        self.failure: Report | None = None
        self.run_is_open = False
        self._under_way: dict[int, NonFiniteBatch] = {}
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)

    def __contains__(self, number: int) -> bool:
        """Return whether the batch of this number is known to be non-finite."""
        return number in self._under_way or number in self._ended

    def has_ended(self, number: int) -> bool:
        """Return whether the batch of this number was non-finite and has ended."""
        return number in self._ended

    def __bool__(self) -> bool:
        """Return whether a non-finite batch is under way, or a run of them is open."""
        return bool(self._under_way) or self.run_is_open

    def get(self, number: int) -> NonFiniteBatch | None:
        """Return the batch of this number, if it is non-finite and under way."""
        return self._under_way.get(number)

    def add(self, number: int, report: Report, *, is_left: bool = False) -> NonFiniteBatch:
        """Remember that this batch is non-finite."""
        self.open_run(report)
        batch = self._under_way[number] = NonFiniteBatch(report, is_left)
        return batch

    def end(self, number: int) -> None:
        """Note that the batch has ended, non-finite or not."""
        if self._under_way.pop(number, None) is not None:
            self._ended.append(number)

    def open_run(self, report: Report) -> None:
        """Keep the report of a failure, if it is the first of its run."""
        if not self.run_is_open:
            self.failure = report
            self.run_is_open = True


@dataclass(slots=True)
class _Count:
    """Faulty batches, and what was at fault in them, by module."""

    first: int = -1
    last: int = -1
    batches: int = 0
    firsts: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, batch: int, module: str) -> None:
        # Batches of several threads come in any order.
        self.first = batch if self.first < 0 else min(self.first, batch)
        self.last = max(self.last, batch)
        self.batches += 1
        self.firsts[module] += 1

    def __str__(self) -> str:
        place = str(self.first) if self.batches == 1 else f"from {self.first} to {self.last}"
        plural = "" if self.batches == 1 else "es"
        return f"{self.batches:,} faulty batch{plural} ({place}), first in {_ranked(self.firsts)}"


class NonFiniteWarnings:
    """Warns of non-finite batches in few lines, with `speaks`; what is not told at once is counted and told in sum.

    A run of non-finite batches is told when it begins, when another module is the first to be at fault, and when it
    ends.
    Lines become rarer where they come often: the n-th line of a run needs 2 ** (n - 2) such batches since the line
    before it, and the n-th run ends after 2 ** (n - 1) finite batches in a row. `patience` is the number for the first
    run: more than 1 where faults are found after the end of a batch.
    """

    def __init__(self, *, speaks: bool, patience: int = 1) -> None:
        self._speaks = speaks
        self._patience = patience
        # Reentrant: the garbage collector or a signal's handler may call the model.
        self._lock = threading.RLock()
        self._all = _Count()
        self._run: _Count | None = None
        self._lines = 0  # of the run
        self._since = 0  # non-finite batches since the latest line
        self._finite = 0  # batches in a row since the latest fault
        self._told: tuple[str, str] = "", ""  # which module, in which phase, was told to be the first

    @property
    def awaits_batches(self) -> bool:
        """Whether `end` is to be called when a batch was finite."""
        return self._run is not None

    def begin(self, finding: Finding | None) -> None:
        """Take the first fault of a batch."""
        if not self._speaks or finding is None:
            return
        with self._lock:
            message = self._begin(finding)
        if message:
            warn_user(message)

    def _begin(self, finding: Finding) -> str:
        place = finding.module, finding.phase
        run, self._finite = self._run, 0
        message = ""
        if run is None:
            self._run = run = _Count()
            self._lines = 0
            message = f"{text.summary(finding)}; Watch.report() has the frames that led to it"
        elif place != self._told and self._since >= 2 ** (self._lines - 1):
            message = f"{text.summary(finding)}; before it, {run}"
        if message:
            self._told, self._since = place, 0
            self._lines += 1
        self._since += 1
        for count in (run, self._all):
            count.add(finding.batch, finding.module)
        return message

    def count(self, module: str) -> None:
        """Take a non-finite call of the module."""
        if self._speaks:
            with self._lock:
                self._all.calls[module] += 1

    def end(self, batch: int) -> None:
        """Take a batch in which all was finite."""
        if self._run is None:
            return
        with self._lock:
            self._finite += 1
            run = self._run
            if run is None or self._finite < self._patience:
                return
            self._run = None
            self._patience *= 2
        warn_user(f"all finite again in batch {batch}, after {run}")

    def close(self, batches: int, *, may_raise: bool) -> None:
        """Tell what there was in all; a second time tells nothing. `batches` is how many there were."""
        with self._lock:
            told, self._all = self._all, _Count()
            self._run = None
        if told.batches:
            calls = f"; faulty calls: {_ranked(told.calls)}" if told.calls else ""
            watched = f"{batches:,} batch{'' if batches == 1 else 'es'}"
            warn_user(f"of {watched} watched, {told}{calls}", may_raise=may_raise)


def _ranked(counts: Counter[str]) -> str:
    """`'0' 45x, '1' 45x, '2' 45x and 57 more modules`, the most frequent first."""
    named = [
        f"{repr(name) if name else module_name(name)} {count:,}x"
        for name, count in counts.most_common(_MAX_NAMED)
    ]
    more = len(counts) - len(named)
    return ", ".join(named) + (f" and {more} more module{'' if more == 1 else 's'}" if more else "")
