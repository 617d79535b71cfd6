"""The largest magnitude of each weight, buffer and output in a batch, for forecasts (peak_magnitudes.h)."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from ..numerics.formats import limits
from ..report.frame import FrameRows
from ..report.record import is_excused

Name: TypeAlias = tuple[str, str, str]  # module, label, dtype

# A model that names its outputs anew in every batch must not fill the memory: beyond this many, none is added.
MOST = 1 << 16


class Largest:
    """Takes the frames of one batch after another; a name that came once keeps its place."""

    def __init__(self) -> None:
        self._places: dict[Name, int] = {}
        self._new: list[Name] = []
        self._values = array("d")
        self._batch = -1

    def add(self, frame: FrameRows) -> None:
        """Take a frame of the batch under way; what there was of another batch is dropped.

        Of an input its maker has the say, of a fault the report; what a backward computes again was seen.
        """
        if frame.recomputed:
            return
        if frame.batch != self._batch:
            self._begin(frame.batch)
        for label, role, _, dtype, _, abs_max, is_finite, _, note in frame.rows:
            if not abs_max or not is_finite or role == "input" or is_excused(note):
                continue
            name = (frame.name, label, dtype)
            place = self._places.get(name)
            if place is None:
                if len(self._places) >= MOST or limits(dtype) is None:
                    continue
                place = self._places[name] = len(self._places)
                self._new.append(name)
                self._values.append(0.0)
            self._values[place] = max(self._values[place], abs_max)

    def take(self) -> tuple[int, list[Name], bytes]:
        """See Recorder.take_largest."""
        taken = self._batch, self._new, self._values.tobytes()
        self._new = []
        self._begin(-1)
        return taken

    def _begin(self, batch: int) -> None:
        self._batch = batch
        self._values = array("d", bytes(8 * len(self._values)))
