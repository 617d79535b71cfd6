"""When a module will overflow, judged by how fast the headroom of its tensors shrinks from batch to batch.

Headroom in bits falls in a straight line while a magnitude grows by a constant factor, which is how trainings diverge.
The line is the Theil-Sen estimate (Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 1968):
the median of the slopes between all pairs of points, with the interval that Sen gives for it. A single wild batch moves
neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf, log2, sqrt
from typing import Any, TypeAlias

import numpy as np

from .frame import FrameRows
from .headroom import NEAR_FACTOR, limits
from .record import is_excused
from .text import module_name

_Key: TypeAlias = tuple[str, str, str]  # module, label, dtype
_Points: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

# Points kept of a tensor; when there are more, the older are joined by twos, so that they reach ever further back. A
# line is laid through the latest and, where that shows nothing, through ever more of them.
_POINTS = 64
_FITTED = 24
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
        return (
            f"`{self.label}` of {module_name(self.module)}: headroom {self.bits:.1f} bits of {self.dtype}, losing"
            f" {self.bits_per_100:.2g} bits per 100 batches: overflow expected near batch {self.batch:,}"
            f" (± {self.plus_minus:,})"
        )


class _Track:
    """The headroom of one tensor over the batches."""

    __slots__ = ("batches", "bits")

    def __init__(self) -> None:
        self.batches: list[float] = []
        self.bits: list[float] = []

    def add(self, batch: int, bits: float) -> float:
        """Take a point; by how many bits it is below the lowest of the eight before it."""
        lost = min(self.bits[-8:], default=bits) - bits
        self.batches.append(batch)
        self.bits.append(bits)
        if len(self.bits) > _POINTS:
            # The latest stay as close together as they came.
            older = (len(self.bits) - _FITTED) // 2 * 2
            self.batches[:older] = _pairs(self.batches[:older])
            self.bits[:older] = _pairs(self.bits[:older])
        return lost

    def end(self) -> tuple[float, float, float, float] | None:
        """`(bits now, bits per batch, batches left, give or take)` of a fall that is sure; None of any other."""
        if len(self.bits) < _LEAST_POINTS:
            return None
        x, y = np.array(self.batches, float), np.array(self.bits)
        if (end := _end(x[-_FITTED:], y[-_FITTED:])) is not None:
            return end
        reaches = range(_FITTED + _FURTHER, len(x) + 1, _FURTHER)
        ends = (_end(x[-n:], y[-n:], straight=_STRAIGHT) for n in reaches)
        return next((end for end in ends if end is not None), None)


def _end(x: _Points, y: _Points, straight: float = 0.0) -> tuple[float, float, float, float] | None:
    n = len(x)
    i, j = np.triu_indices(n, 1)
    slopes = np.sort((y[j] - y[i]) / (x[j] - x[i]))
    deviation = sqrt(n * (n - 1) * (2 * n + 5) / 18)
    if np.sign(slopes).sum() > -_SURE * deviation:
        return None
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
    half = _QUANTILE * deviation / 2
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


def _pairs(points: list[float]) -> list[float]:
    """The mean of every two."""
    return [(a + b) / 2 for a, b in zip(points[::2], points[1::2], strict=True)]


class Forecaster:
    """Takes the frames of some batches and foretells overflows; a few hundred bytes for each tensor, for good.

    `is_due(batch)` says whether the frames of a batch are wanted: of the first all, then fewer, and of all again as
    long as a tensor not far from the end of its format loses room fast.
    """

    def __init__(self) -> None:
        self._tracks: dict[_Key, _Track] = {}
        self._batch = -1
        self._largest: dict[_Key, float] = {}
        self._next = 0
        self._pause = 1
        self._told: dict[str, int] = {}

    def is_due(self, batch: int) -> bool:
        """Whether the frames of this batch are wanted."""
        return batch >= self._next

    def add(self, frame: FrameRows) -> None:
        """Take a frame of the batch that is under way; those of one that went wrong are dropped with the next.

        Of an input its maker has the say, of a fault the report.
        """
        if frame.batch != self._batch:
            self._batch, self._largest = frame.batch, {}
        name, largest = frame.name, self._largest
        for label, role, _, dtype, _, abs_max, is_finite, _, note in frame.rows:
            if abs_max and is_finite and role != "input" and not (note and is_excused(note)):
                key = (name, label, dtype)
                if abs_max > largest.get(key, 0.0):
                    largest[key] = abs_max

    def end(self, batch: int) -> list[Forecast]:
        """The batch is done: what is new to say, at most once a module in 1,000 batches."""
        largest, self._largest = self._largest, {}
        is_fast = False
        found = []
        for key, abs_max in largest.items():
            end_bits = _end_bits(key[2])
            if end_bits is None or abs_max == inf:
                continue
            bits = end_bits - log2(abs_max)
            track = self._tracks.get(key)
            if track is None:
                track = self._tracks[key] = _Track()
            elif track.batches[-1] >= batch:
                continue  # another thread's batch was quicker
            lost = track.add(batch, bits)
            is_fast |= lost > _FAST_BITS and bits < 2 * _NEAR_BITS
            if bits > _NEAR_BITS or batch - self._told.get(key[0], -_SILENCE) < _SILENCE:
                continue
            if (end := track.end()) is not None:
                now, slope, left, margin = end
                self._told[key[0]] = batch
                found.append(Forecast(*key, now, -100 * slope, round(batch + left), max(1, round(margin))))
        # All at first: what diverges from the start does so in a few batches.
        self._pause = 1 if is_fast or batch < _POINTS else min(_MOST_BATCHES, 2 * self._pause)
        self._next = batch + self._pause
        return found
