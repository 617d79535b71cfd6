"""How often each weight and buffer was seen to change, for the rows of a trace."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from math import isnan
from typing import Any, TypeAlias

from ..report.frame import FrameRows
from ..report.record import Row

Key: TypeAlias = tuple[str, str]  # module and label

# Steps that wait for the frames of a later batch. Of a run that is paused, or seldom looked at, the oldest are counted
# at once: nothing older is still to come.
_MOST_WAITING = 4096


class WeightVersions:
    """Counts changes: the steps that took a weight, and other changes where its row says that it is not what it was.

    `step` is called by who trains, `column` by who writes, with the frames in the order of their calls.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Collection[Key]]] = deque()
        self._counts: dict[Key, int] = {}
        # Of each weight what was last seen of it, and its count then.
        self._seen: dict[Key, tuple[Any, int]] = {}
        # Not a plain lock: the garbage collector may run anybody's code within, and that may make a step.
        self._lock = threading.RLock()

    def step(self, batch: int, keys: Collection[Key]) -> None:
        """A step took these, after batch `batch` had begun and before the next."""
        with self._lock:
            self._steps.append((batch, keys))
            while len(self._steps) > _MOST_WAITING:
                self._count()

    def column(self, frame: FrameRows) -> list[int | None]:
        """Of each row the number of changes before it; None for what is no weight or buffer of a forward."""
        with self._lock:
            while self._steps and self._steps[0][0] < frame.batch:
                self._count()
        if frame.phase != "forward":
            return [None] * len(frame.rows)
        return [
            self._version(frame.name, row) if row.role in ("weight", "buffer") else None for row in frame.rows
        ]

    def _count(self) -> None:
        for key in self._steps.popleft()[1]:
            self._counts[key] = self._counts.get(key, 0) + 1

    def _version(self, module: str, row: Row) -> int:
        key = (module, row.label)
        # A nan differs from itself.
        range_ = tuple(None if x is None or isnan(x) else x for x in (row.abs_min, row.abs_max))
        now = (row.shape, row.dtype, *range_, row.isfinite)
        count = self._counts.get(key, 0)
        before = self._seen.get(key)
        if before is not None and before[1] == count and before[0] != now:
            count = self._counts[key] = count + 1
        self._seen[key] = (now, count)
        return count
