"""The latest frames, and how many each of the latest batches has had."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..report.frame import FrameRows

_BATCHES = 16  # more than one is under way where several threads call the model


class FrameRing(deque[FrameRows]):
    """A deque that drops the oldest frame for a new one, and counts also what it has dropped."""

    def __init__(self, max_frames: int) -> None:
        super().__init__(maxlen=max_frames)
        self._counts: dict[int, int] = {}
        self._forgotten = -2  # the latest batch that is counted no more

    def append(self, frame: FrameRows) -> None:
        """Keep the frame and count it."""
        super().append(frame)
        if frame.batch not in self._counts:
            if frame.batch <= self._forgotten:
                return
            if len(self._counts) == _BATCHES:
                oldest = min(self._counts)
                del self._counts[oldest]
                self._forgotten = max(self._forgotten, oldest)
            self._counts[frame.batch] = 0
        self._counts[frame.batch] += 1

    def extend(self, frames: Iterable[FrameRows]) -> None:
        """Keep these and count them."""
        for frame in frames:
            self.append(frame)

    def of_batch(self, batch: int) -> int | None:
        """How many frames of the batch were kept; None where so many batches came after it that it is forgotten."""
        return self._counts.get(batch, None if batch <= self._forgotten else 0)
