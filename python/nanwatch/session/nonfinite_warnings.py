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
    """Non-finite batches, and the modules that were the first in them."""

    batches: int = 0
    first: int = -1
    last: int = -1
    modules: Counter[str] = field(default_factory=Counter)

    def add(self, batch: int, module: str) -> None:
        # Batches of several threads come in any order.
        self.first = batch if self.first < 0 else min(self.first, batch)
        self.last = max(self.last, batch)
        self.batches += 1
        self.modules[module] += 1

    def __str__(self) -> str:
        place = f"({self.first})" if self.batches == 1 else f"(from {self.first} to {self.last})"
        plural = "" if self.batches == 1 else "es"
        return f"{self.batches:,} non-finite batch{plural} {place}, first in {_ranked(self.modules)}"


class NonFiniteWarnings:
    """Warnings of runs of non-finite batches: a line for the beginning and the end of the 1st, 2nd, 4th, 8th run.

    `patience` is the number of finite batches that end a run.
    """

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience
        # Reentrant, because the garbage collector or a signal's handler may call the model.
        self._lock = threading.RLock()
        self._all = _Count()
        self._calls: Counter[str] = Counter()
        self._run: _Count | None = None
        self._num_runs = 0
        self._num_finite = 0  # batches in a row since the latest failure

    @property
    def awaits_batches(self) -> bool:
        """True while `end` is to be called after a finite batch."""
        return self._run is not None

    @property
    def _is_due(self) -> bool:
        return self._num_runs & (self._num_runs - 1) == 0

    def begin(self, finding: Finding) -> None:
        """Take the first failure of a batch."""
        with self._lock:
            is_new = self._run is None
            self._run = self._run or _Count()
            self._num_runs, self._num_finite = self._num_runs + is_new, 0
            for count in (self._run, self._all):
                count.add(finding.batch, finding.module)
        if is_new and self._is_due:
            warn_user(f"{text.summary(finding)}; {WHERE}")

    def count(self, module: str) -> None:
        """Take a non-finite call of the module."""
        with self._lock:
            self._calls[module] += 1

    def end(self, batch: int) -> None:
        """Take a finite batch."""
        with self._lock:
            self._num_finite += 1
            if self._num_finite < self._patience:
                return
            run, self._run = self._run, None
        if run is not None and self._is_due:
            warn_user(f"all finite again in batch {batch}, after {run}")

    def close(self, batches: int, *, may_raise: bool) -> None:
        """Warn once of the sum over all `batches` watched batches."""
        with self._lock:
            total, self._all, self._run = self._all, _Count(), None
        if total.modules:
            calls = f"; non-finite calls: {_ranked(self._calls)}" if self._calls else ""
            watched = f"{batches:,} batch{'' if batches == 1 else 'es'}"
            warn_user(f"of {watched} watched, {total}{calls}", may_raise=may_raise)


def _ranked(counts: Counter[str]) -> str:
    """Return `'0' 45x, '1' 45x, '2' 45x and 57 more modules`, the most frequent first."""
    words = [
        f"{repr(name) if name else module_name(name)} {count:,}x"
        for name, count in counts.most_common(_MAX_NAMED)
    ]
    more = len(counts) - len(words)
    return ", ".join(words) + (f" and {more} more module{'' if more == 1 else 's'}" if more else "")
