"""Warnings of non-finite batches in few lines, and a sum of all at the end."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from ..report import text
from ..report.finding import Finding
from ..util.visible import module_name, warn_user

# Modules named in one line.
_MAX_NAMED = 3
WHERE = "Watch.report() (or --output-dir) has the frames that led to it"


@dataclass(slots=True)
class _Count:
    """Counts of non-finite batches and calls, by module."""

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
        return f"{self.batches:,} non-finite batch{plural} ({place}), first in {_ranked(self.firsts)}"


class NonFiniteWarnings:
    """Warnings of non-finite batches in few lines, and a sum of all at the end.

    A line comes when a run of non-finite batches begins, when another module is the first at fault, and when the run
    ends. Frequent lines get rarer: the n-th line of a run needs 2 ** (n - 2) such batches since the line before it, and
    the n-th run ends after 2 ** (n - 1) finite batches in a row. `patience` is that number for the first run: more than
    1 where failures are found after the end of a batch.
    """

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience
        # Reentrant, because the garbage collector or a signal's handler may call the model.
        self._lock = threading.RLock()
        self._all = _Count()
        self._run: _Count | None = None
        self._lines = 0  # of the run
        self._since = 0  # non-finite batches since the latest line
        self._finite = 0  # batches in a row since the latest failure
        self._latest_line: tuple[str, str] = "", ""  # module and phase of the latest line

    @property
    def awaits_batches(self) -> bool:
        """True while `end` is to be called after a finite batch."""
        return self._run is not None

    def begin(self, finding: Finding) -> None:
        """Take the first failure of a batch."""
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
            message = f"{text.summary(finding)}; {WHERE}"
        elif place != self._latest_line and self._since >= 2 ** (self._lines - 1):
            message = f"{text.summary(finding)}; before it, {run}"
        if message:
            self._latest_line, self._since = place, 0
            self._lines += 1
        self._since += 1
        for count in (run, self._all):
            count.add(finding.batch, finding.module)
        return message

    def count(self, module: str) -> None:
        """Take a non-finite call of the module."""
        with self._lock:
            self._all.calls[module] += 1

    def end(self, batch: int) -> None:
        """Take a finite batch."""
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
        """Warn once of the sum over all `batches` watched batches."""
        with self._lock:
            total, self._all = self._all, _Count()
            self._run = None
        if total.batches:
            calls = f"; non-finite calls: {_ranked(total.calls)}" if total.calls else ""
            watched = f"{batches:,} batch{'' if batches == 1 else 'es'}"
            warn_user(f"of {watched} watched, {total}{calls}", may_raise=may_raise)


def _ranked(counts: Counter[str]) -> str:
    """Return `'0' 45x, '1' 45x, '2' 45x and 57 more modules`, the most frequent first."""
    named = [
        f"{repr(name) if name else module_name(name)} {count:,}x"
        for name, count in counts.most_common(_MAX_NAMED)
    ]
    more = len(counts) - len(named)
    return ", ".join(named) + (f" and {more} more module{'' if more == 1 else 's'}" if more else "")
