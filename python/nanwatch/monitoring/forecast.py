"""Forecasts of overflow: which module will leave its format first, and in which batch (growth.py has the models).

Nothing here asks for the time, so two runs of one seed tell the same. What looks cost is bounded by counting them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import cosh, inf, log2, sinh

import numpy as np

from ..numerics.formats import limits
from ..recording.frame_ring import PeakName
from ..report.text import module_name
from ..util.visible import visible
from .growth import ending
from .tracks import POINTS, Floats, Numbers, Tracks

# Looks: one in `batch // 64` batches, at least one in 16, more where an end is near. At most so many may be spared, and
# they come back at one in eight batches.
_MOST_BATCHES = 16
_SPARED = 128
_SPARED_A_BATCH = 1 / 8
_LOOKS_TO_END = 16
# A tensor is followed where a straight line ends within three times the span of its points; models of growth are laid
# through those that end soonest.
_FOLLOWED = 3.0
_MOST_FITS = 4
# An interval is so many deviations to either side.
_DEVIATIONS = 1.15
# Nothing is said of what is further ahead than 0.6 of the span, or sooner than 2 batches.
_REACH = 0.6
_LEAST_LEFT = 2
# Nor of what has more than a third of its headroom left: growth that will stop looks like growth that will not.
_MOST_ROOM = 1 / 3
# Lines in so many batches.
_MOST_LINES = 3
_LINES_IN = 10_000


@dataclass(frozen=True, slots=True)
class Forecast:
    """`label` of `module` has `bits` of headroom in `dtype` and loses `bits_per_100` in 100 batches. It is expected to
    overflow near `batch`, give or take `plus_minus` batches, the first of all modules; so many `followers` will later.
    `replaces` is the batch of the forecast that no longer holds."""

    module: str
    label: str
    dtype: str
    bits: float
    bits_per_100: float
    batch: int
    plus_minus: int
    followers: int = 0
    replaces: int | None = None

    def __str__(self) -> str:
        text = (
            f"`{self.label}` of {module_name(self.module)}: headroom {self.bits:.1f} bits of {self.dtype}, losing"
            f" {self.bits_per_100:.2g} bits per 100 batches: overflow expected near batch {self.batch:,}"
            f" (± {self.plus_minus:,})"
        )
        if self.followers:
            text += f"; {self.followers:,} more module{'s follow' if self.followers > 1 else ' follows'}"
        if self.replaces is not None:
            text += f"; replaces the forecast of batch {self.replaces:,}"
        return visible(text)


@cache
def _end_bits(dtype: str) -> float | None:
    """log2 of the largest finite number of the format; None for what is none."""
    ends = limits(dtype)
    return None if ends is None else log2(ends.largest)


class Forecaster:
    """Takes the largest magnitudes of some batches and foretells overflows; 0.8 KiB for each tensor, for good.

    `is_due(batch)` says whether a batch is wanted. `room`: how many tensors there may be.
    """

    def __init__(self, room: int = 0) -> None:
        self._names: list[PeakName] = []
        self._track_of: dict[PeakName, int] = {}
        # By place among the values; -1 for what has no format.
        self._track_at: Numbers = np.empty(0, np.int64)
        self._ends: Floats = np.empty(0)  # by track: log2 of the largest number of the format
        self._tracks = Tracks(room)
        self._last = -1
        self._pause = 1
        self._spared = float(_SPARED)
        self._expected: tuple[float, float] | None = None  # the interval of the latest look, told or not
        self._told: list[tuple[int, Forecast]] = []  # with the batches that they were told in

    def is_due(self, batch: int) -> bool:
        """Whether this batch is wanted."""
        since = batch - self._last
        return since >= _MOST_BATCHES or (
            since >= self._pause and self._spared + since * _SPARED_A_BATCH >= 1
        )

    def meet(self, names: Sequence[PeakName]) -> None:
        """The names of the next values, which come after those that were met before."""
        if not names:
            return
        places, ends = [], []
        for name in names:
            end = _end_bits(name[2])
            track = -1 if end is None else self._track_of.setdefault(name, len(self._names))
            if end is not None and track == len(self._names):
                self._names.append(name)
                ends.append(end)
            places.append(track)
        self._track_at = np.append(self._track_at, places)
        self._ends = np.append(self._ends, ends)
        self._tracks.grow(len(self._names))

    def end(self, batch: int, values: bytes) -> list[Forecast]:
        """The batch is done: return what is new to say, at most one forecast.

        `values` are the largest magnitudes as Recorder.take_peaks gives them.
        """
        since = max(1, batch - self._last)
        self._spared = max(0.0, min(_SPARED, self._spared + since * _SPARED_A_BATCH) - 1)
        self._last = max(batch, self._last)
        tracks = self._add(batch, np.frombuffer(values))
        bits, losses, late, spans = self._tracks.falls(tracks)
        with np.errstate(divide="ignore", invalid="ignore"):
            left, soonest = (np.where(loss > 0, bits / loss, inf) for loss in (losses, np.fmax(losses, late)))
        falling = np.flatnonzero(left <= _FOLLOWED * spans)
        falling = falling[np.argsort(left[falling], kind="stable")]
        usual = min(_MOST_BATCHES, max(1, batch // POINTS))
        self._pause = max(1, int(min(usual, soonest.min(initial=inf) / _LOOKS_TO_END)))
        if not len(falling):
            self._expected = None
            return []
        found = self._leader(batch, tracks[falling[:_MOST_FITS]])
        if found is None:
            return []
        row = falling[found[0]]
        middle, margin = found[1], found[2]
        followers = {self._names[tracks[i]][0] for i in falling if left[i] <= 2 * (middle + margin - batch)}
        module, label, dtype = self._names[tracks[row]]
        forecast = Forecast(
            module,
            label,
            dtype,
            float(bits[row]),
            100 * float(losses[row]),
            round(middle),
            max(1, round(margin)),
            len(followers - {module}),
            self._told[-1][1].batch if self._told else None,
        )
        self._told.append((batch, forecast))
        return [forecast]

    def _add(self, batch: int, values: Floats) -> Numbers:
        """Add a point to the tracks that go on, and return these."""
        # The modulus of a complex number may be inf, of which there is no power of two.
        places = np.flatnonzero((values > 0) & (values < inf) & (self._track_at >= 0))
        largest = np.zeros(len(self._names))
        np.maximum.at(largest, self._track_at[places], values[places])
        # Another thread's later batch may have been quicker.
        tracks = np.flatnonzero((largest > 0) & (self._tracks.latest < batch))
        self._tracks.add(tracks, batch, self._ends[tracks] - np.log2(largest[tracks]))
        return tracks

    def _leader(self, batch: int, tracks: Numbers) -> tuple[int, float, float] | None:
        """Return which of these ends first, the batch and the margin, where that is to be told."""
        found = None
        for place, track in enumerate(tracks):
            points = self._tracks.points(track)
            end = ending(*points)
            if end is not None and (found is None or end.left < found[1].left):
                found = place, end, points[0][-1] - points[0][0], points[1]
        before, self._expected = self._expected, None
        if found is None:
            return None
        place, end, span, bits = found
        # In the logarithm of the time that is left, the interval lies evenly.
        spread = _DEVIATIONS * end.deviation
        if spread > 1:
            return None
        middle, margin = batch + end.left * cosh(spread), end.left * sinh(spread)
        if 2 * margin > end.left or not _LEAST_LEFT <= end.left <= _REACH * span:
            return None
        if bits[-1] > _MOST_ROOM * bits.max():
            return None
        self._expected = middle - margin, middle + margin
        # One look is not believed.
        if before is None or before[0] > middle + margin or before[1] < middle - margin:
            return None
        return (place, middle, margin) if self._is_new(batch, middle, margin) else None

    def _is_new(self, batch: int, middle: float, margin: float) -> bool:
        self._told = [one for one in self._told if batch - one[0] < _LINES_IN]
        if not self._told:
            return True
        last = self._told[-1][1]
        shift = abs(middle - last.batch)
        has_changed = batch > last.batch + last.plus_minus or shift > max(last.plus_minus, margin)
        return has_changed and len(self._told) < _MOST_LINES
