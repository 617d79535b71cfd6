"""When a module will overflow, judged by how fast the headroom of its tensors shrinks from batch to batch.

Headroom in bits falls in a straight line while a magnitude grows by a constant factor, which is how trainings diverge.
The line is the Theil-Sen estimate (Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 1968):
the median of the slopes between all pairs of points, with the interval that Sen gives for it. A single wild batch moves
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, log2, sqrt
from time import monotonic
from typing import TypeAlias

import numpy as np

from .formats import limits
from .headroom import NEAR_FACTOR
from .largest import Name
from .text import module_name
from .tracks import LATEST, POINTS, Floats, Numbers, Tracks
from .visible import visible

_Line: TypeAlias = tuple[float, float, float, float]  # bits now, bits per batch, batches left, give or take

# A line is laid through the latest points and, where that shows nothing, through ever more of them.
_FURTHER = 8
_LEAST_POINTS = 12
# Nothing is said of what is further from the end of its format than what a usual factor takes away at once.
_NEAR_BITS = log2(NEAR_FACTOR)
# Kendall's S of a fall that chance alone would show once in 30,000 times, in standard deviations.
_SURE = 4.0
# How far ahead: as far as the points reach back. Of a fall that has lost half its speed nothing is said.
_REACH = 1.0
_STILL_FALLING = 0.5
# The share of the variance of all points that their line has to explain: over that long what wanders looks like a fall.
_STRAIGHT = 0.85
# Of the way to the end, added on either side to Sen's interval, which knows of noise but not of bends.
_BEND = 0.25
_QUANTILE = 2.58  # of the normal distribution, for 99 %
# Batches from one look to the next: at first and where headroom falls fast, and where nothing happens.
_MOST_BATCHES = 16
_FAST_BITS = 0.25
_SILENCE = 1000  # batches, after a module was warned of
# The time that looks may take: 20 ms at once, which nobody notices, and 2 ms a second.
_TIME_AT_ONCE = 0.02
_SHARE = 1 / 500


@dataclass(frozen=True, slots=True)
class Forecast:
    """`label` of `module` has `bits` of headroom in `dtype` and loses `bits_per_100` in 100 batches; at this rate it
    overflows near `batch`, give or take `plus_minus` batches."""

    module: str
    label: str
    dtype: str
    bits: float
    bits_per_100: float
    batch: int
    plus_minus: int

    def __str__(self) -> str:
        return visible(
            f"`{self.label}` of {module_name(self.module)}: headroom {self.bits:.1f} bits of {self.dtype}, losing"
            f" {self.bits_per_100:.2g} bits per 100 batches: overflow expected near batch {self.batch:,}"
            f" (± {self.plus_minus:,})"
        )


class _Allowance:
    """Time that may be spent: it comes with time, and not more is kept than at first."""

    def __init__(self) -> None:
        self._left = _TIME_AT_ONCE
        self._since = monotonic()

    @property
    def is_open(self) -> bool:
        """Whether some is left."""
        now = monotonic()
        self._left = min(_TIME_AT_ONCE, self._left + _SHARE * (now - self._since))
        self._since = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        """Take so much away, also more than there is."""
        self._left -= seconds


def _end(x: Floats, y: Floats, straight: float) -> _Line | None:
    n = len(x)
    i, j = np.triu_indices(n, 1)
    slopes = np.sort((y[j] - y[i]) / (x[j] - x[i]))
    slope = float(np.median(slopes))
    rest = y - slope * x
    now = float(np.median(rest)) + slope * float(x[-1])
    if slope >= 0 or now <= 0 or rest.var() > (1 - straight) * y.var():
        return None
    span = float(x[-1] - x[0])
    # Of pairs close together the slope is noise.
    late = (x[i] >= x[0] + span * 2 / 3) & (x[j] - x[i] >= span / 9)
    late_slope = float(np.median(((y[j] - y[i]) / (x[j] - x[i]))[late])) if late.any() else 0.0
    if late_slope > slope * _STILL_FALLING:
        return None
    # What diverges often does so ever faster.
    steepest = min(slope, (slope + late_slope) / 2)
    left = -now / steepest
    if -now / slope > _REACH * span:
        return None
    half = _QUANTILE * _deviation(n) / 2
    middle = len(slopes) / 2
    low, high = (slopes[int(min(max(middle + side, 0), len(slopes) - 1))] for side in (-half, half))
    sooner = left + now / float(low + steepest - slope)
    later = (
        -now / min(float(high) + steepest - slope, steepest / 3) - left
    )  # chance alone may make it endless
    bend = _BEND * left + now / steepest - now / slope
    return now, steepest, left, max(sooner, later) + bend + float(x[-1] - x[-2])


@cache
def _end_bits(dtype: str) -> float | None:
    """log2 of the largest finite number of the format; None for what is none."""
    ends = limits(dtype)
    return None if ends is None else log2(ends.largest)


class Forecaster:
    """Takes the largest magnitudes of some batches and foretells overflows; 0.8 KiB for each tensor, for good.

    `is_due(batch)` says whether a batch is wanted: of the first all, then fewer, and of all again as long as a tensor
    not far from the end of its format loses room fast. Of these only as many as fit into a five-hundredth of the time,
    but one in sixteen in any case. `room`: how many tensors there may be.
    """

    def __init__(self, room: int = 0) -> None:
        self._names: list[Name] = []
        self._track_of: dict[Name, int] = {}
        # By place among the values; -1 for what has no format.
        self._track_at: Numbers = np.empty(0, np.int64)
        self._ends: Floats = np.empty(0)  # by track: log2 of the largest number of the format
        self._tracks = Tracks(room)
        self._last = -_MOST_BATCHES
        self._pause = 1
        self._allowance = _Allowance()
        self._told: dict[str, int] = {}
        self._turn = 0

    def is_due(self, batch: int) -> bool:
        """Whether this batch is wanted."""
        since = batch - self._last
        return since >= _MOST_BATCHES or (since >= self._pause and self._allowance.is_open)

    def meet(self, names: Sequence[Name]) -> None:
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
        """The batch is done: what is new to say, at most once a module in 1,000 batches.

        `values` are the largest magnitudes as Recorder.take_largest gives them.
        """
        begun = monotonic()
        tracks, bits = self._headroom(batch, np.frombuffer(values))
        close = bits < 2 * _NEAR_BITS
        lost = self._tracks.lowest(tracks[close]) - bits[close]
        self._tracks.add(tracks, batch, bits)
        found = self._foretold(batch, tracks[bits <= _NEAR_BITS], begun + _TIME_AT_ONCE)
        # All at first: what diverges from the start does so in a few batches.
        is_urgent = batch < POINTS or bool((lost > _FAST_BITS).any())
        self._pause = 1 if is_urgent else min(_MOST_BATCHES, 2 * self._pause)
        self._last = batch
        self._allowance.spend(monotonic() - begun)
        return found

    def _headroom(self, batch: int, values: Floats) -> tuple[Numbers, Floats]:
        """The tracks that go on, and their bits."""
        # The modulus of a complex number may be inf, of which there is no power of two.
        places = np.flatnonzero((values > 0) & (values < inf) & (self._track_at >= 0))
        largest = np.zeros(len(self._names))
        np.maximum.at(largest, self._track_at[places], values[places])
        # Another thread's later batch may have been quicker.
        tracks = np.flatnonzero((largest > 0) & (self._tracks.latest < batch))
        return tracks, self._ends[tracks] - np.log2(largest[tracks])

    def _foretold(self, batch: int, near: Numbers, until: float) -> list[Forecast]:
        found = []
        balance = self._tracks.balance(near)
        falling = np.flatnonzero(balance.min(axis=1, initial=0.0) <= -_SURE * _deviation(_LEAST_POINTS))
        # Where hundreds fall at once there is not the time for a line through each: the others are next.
        for done, row in enumerate(np.roll(falling, -self._turn)):
            if done and monotonic() > until:
                self._turn = (self._turn + done) % len(falling)
                break
            module, label, dtype = self._names[near[row]]
            if batch - self._told.get(module, -_SILENCE) < _SILENCE:
                continue
            if (line := _line(*self._tracks.points(near[row]), balance[row])) is not None:
                now, slope, left, margin = line
                self._told[module] = batch
                end, plus_minus = round(batch + left), max(1, round(margin))
                found.append(Forecast(module, label, dtype, now, -100 * slope, end, plus_minus))
        return found


def _line(x: Floats, y: Floats, balance: Floats) -> _Line | None:
    """That of a fall that is sure; None of any other. `balance` is Kendall's S of the latest n points, by n."""
    least = min(LATEST, len(x))
    for n in range(least, len(x) + 1, _FURTHER):
        if n >= _LEAST_POINTS and balance[n] <= -_SURE * _deviation(n):
            line = _end(x[-n:], y[-n:], 0.0 if n == least else _STRAIGHT)
            if line is not None:
                return line
    return None


def _deviation(n: int) -> float:
    """The standard deviation of Kendall's S of n points that chance alone puts in their order."""
    return sqrt(n * (n - 1) * (2 * n + 5) / 18)
