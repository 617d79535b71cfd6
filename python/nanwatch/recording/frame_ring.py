"""Ring buffer of the latest frames, and peak magnitudes: of a batch, or of the gradients since they were taken."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from ..records.record import Frame, Record
from .events import PeakName

_BATCHES = 16  # more than one is under way where several threads call the model
# A model that names its outputs anew in every batch must not fill the memory: beyond this many, none is added.
MAX_PEAKS = 1 << 16


class FrameRing(deque[Frame]):
    """A deque that drops the oldest frame for a new one, and counts also what it has dropped."""

    def __init__(self, max_frames: int) -> None:
        super().__init__(maxlen=max_frames)
        self._counts: dict[int, int] = {}
        self._forgotten = -2  # the latest batch that is counted no more

    def append(self, frame: Frame) -> None:
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

    def extend(self, frames: Iterable[Frame]) -> None:
        """Keep and count these frames."""
        for frame in frames:
            self.append(frame)

    def of_batch(self, batch: int) -> int | None:
        """Return how many frames of the batch were kept; None for a batch that is no longer counted."""
        return self._counts.get(batch, None if batch <= self._forgotten else 0)


class PeakMagnitudes:
    """The largest magnitude of each tensor of a batch, inputs on request, or of each gradient; see peak_magnitudes.h.

    A name that came once keeps its position.
    """

    def __init__(self) -> None:
        self._positions: dict[PeakName, int] = {}
        self._new: list[PeakName] = []
        self._values = array("d")
        self._batch = -1

    def add(self, frame: Frame, with_inputs: bool = False) -> None:
        """Take a frame of the batch under way. A frame of another batch drops what was taken before.

        An input counts at the module that made it, unless `with_inputs`. A non-finite value counts in the report. A
        frame recomputed in a backward was taken in the forward.
        """
        if frame.recomputed:
            return
        if frame.batch != self._batch:
            self._begin(frame.batch)
        for row in frame.records:
            if with_inputs or row.role != "input":
                self._raise(frame.name, row)

    def add_gradient(self, batch: int, name: str, row: Record) -> None:
        """Take a gradient of a call of the module of this name; those of earlier batches stay until they are taken."""
        self._batch = max(self._batch, batch)
        self._raise(name, row)

    def _raise(self, module: str, row: Record) -> None:
        if row.abs_max is None or not row.isfinite or row.is_excused:
            return
        name = (module, row.label, row.dtype)
        position = self._positions.get(name)
        if position is None:
            if len(self._positions) >= MAX_PEAKS or row.ends is None:
                return
            position = self._positions[name] = len(self._positions)
            self._new.append(name)
            self._values.append(0.0)
        self._values[position] = max(self._values[position], row.abs_max)

    def take(self) -> tuple[int, list[PeakName], bytes]:
        """Return and forget the peaks, as `Recorder.take_peaks`."""
        taken = self._batch, self._new, self._values.tobytes()
        self._new = []
        self._begin(-1)
        return taken

    def _begin(self, batch: int) -> None:
        self._batch = batch
        self._values = array("d", bytes(8 * len(self._values)))
