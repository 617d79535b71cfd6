"""Own time: the time that nanwatch's recorder takes of a training step, measured in one step of many."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from ..recording.events import Event, Recorder


class OwnTime(NamedTuple):
    """Time that the recorder took, in seconds a batch, and as a share of the time between the ends of two batches."""

    seconds: float
    share: float


class OwnTimeSample:
    """Measures own time in the second batch after each that asks for it. Only these two pay for readings of the clock.

    `latest` is None before the first measurement, and without the compiled part, which alone counts its time.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.latest: OwnTime | None = None
        self._recorder = recorder
        self._clock = recorder.subscribe(Event.OWN_TIME)
        self._clock.active = False
        self._begun: tuple[float, int] | None = None

    def batch_ended(self, asks: bool, num_batches: int) -> None:
        """Take the end of a batch, the last of `num_batches` since the one before. `asks` for a measurement.

        This runs inside the model's call, whose own time is counted when it returns. So the clock runs for a batch
        before the measurement begins, and the call at its beginning counts for the one at its end.
        """
        if self._begun is not None:
            (begun, before), self._begun = self._begun, None
            self._clock.active = False
            passed, own = monotonic() - begun, (self._recorder.counters["nanoseconds"] - before) * 1e-9
            self.latest = OwnTime(own / num_batches, own / max(passed, own, 1e-9))
        elif self._clock.active:
            self._begun = (monotonic(), self._recorder.counters["nanoseconds"])
        elif asks:
            self._clock.active = "nanoseconds" in self._recorder.counters

    def remove(self) -> None:
        """Measure no more."""
        self._begun = None
        self._clock.remove()
