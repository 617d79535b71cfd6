"""The batches of a watch in which a value was not finite, and the report of the failure that the watch tells."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..report.report import Report

# Of batches that have ended these many are known as faulty, for their backwards and their recomputations.
_MAX_ENDED = 64


@dataclass(slots=True)
class FaultyBatch:
    """A batch under way from its first fault on. It belongs to the thread that makes the batch.

    `report` is of the first fault. `is_told` says that it was raised or handed to the user's function, `is_left` that
    the thread had ended the batch before its rows came from the device.
    """

    report: Report
    is_left: bool = False
    is_told: bool = False


class FaultyBatches:
    """The faulty batches under way, at most one for each thread, and the latest that have ended, by their numbers.

    `failure` is the report of the first of the latest run of faulty batches. The run is open until a batch is finite.
    """

    def __init__(self) -> None:
        self.failure: Report | None = None
        self.run_is_open = False
        self._under_way: dict[int, FaultyBatch] = {}
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)

    def __contains__(self, number: int) -> bool:
        """Whether the batch of this number is known to be faulty."""
        return number in self._under_way or number in self._ended

    def has_ended(self, number: int) -> bool:
        """Return whether the batch of this number was faulty and has ended."""
        return number in self._ended

    def __bool__(self) -> bool:
        """Whether a faulty batch is under way, or the run of faulty ones is open."""
        return bool(self._under_way) or self.run_is_open

    def get(self, number: int) -> FaultyBatch | None:
        """Return the batch of this number, if it is faulty and under way."""
        return self._under_way.get(number)

    def add(self, number: int, report: Report, *, is_left: bool = False) -> FaultyBatch:
        """Remember that this batch is faulty."""
        self.open_run(report)
        faulty = self._under_way[number] = FaultyBatch(report, is_left)
        return faulty

    def end(self, number: int) -> None:
        """Note that the batch has ended, faulty or not."""
        if self._under_way.pop(number, None) is not None:
            self._ended.append(number)

    def open_run(self, report: Report) -> None:
        """Keep the report of a failure, if it is the first of its run."""
        if not self.run_is_open:
            self.failure = report
            self.run_is_open = True
