"""Forecasts of overflow, and the history of largest magnitudes that they, spikes and suspicion are made from.

A forecast says which module will leave its format first, and in which batch. It is a least-squares line on log2 of a
tensor's largest magnitudes. The forecaster never reads a clock, so two runs of one seed make the same forecasts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log2, nan
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..numerics.formats import limits
from ..recording.events import PeakName
from ..records.record import Frame, Note, event_frame
from ..report.events import Departure
from ..util.messages import module_name, visible

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"

# The forecaster looks at batches 0, 1, 2, 4, 8 and every 16th, from batch 1,024 on after a 64th of the run, at most 64
# batches apart. It looks more often where the line through the latest two points ends soon: at most 32 times and in one
# of eight batches. A look takes 0.2 to 0.3 ms, in every 16th batch a quarter of the cost of watching a small MLP.
_EVERY, _LONGEST = 16, 64
_FURTHER, _FURTHER_A_BATCH = 32, 1 / 8
_LOOKS_TO_END = 32
# A line goes through the latest 16 or 24 points, whichever gives the narrowest interval. Noise asks for more points,
# and growth that bends for fewer.
_POINTS, _FEWEST = (16, 24), 10
# An interval is so many standard deviations to either side, and a share of the time that is left.
_DEVIATIONS, _LEAST_SHARE = 2.0, 0.15
# Growth bends: the line through the latest half of the points ends elsewhere. The end moves by 1.5 times that distance,
# since weights that grow in a straight line bend on, and the interval by 1.25 times.
_BEND, _BEND_MARGIN = 1.5, 1.25
# A forecast is neither further ahead than 0.6 of all batches, nor sooner than 2 batches.
_REACH, _LEAST_LEFT = 0.6, 2
# No forecast while more than a third of the headroom is left: growth that will stop looks like growth that will not.
_MOST_ROOM = 1 / 3
# Lines in so many batches.
_MOST_LINES, _LINES_IN = 3, 10_000


@dataclass(frozen=True, slots=True)
class Forecast:
    """Prediction that `label` of `module` overflows near `batch`, give or take `plus_minus` batches, first of all.

    It has `bits` of headroom in `dtype` and loses `bits_per_100` in 100 batches. `followers` more modules overflow
    later. `replaces` is the batch of the forecast that no longer holds.
    """

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

    def rows(self, batch: int) -> Frame:
        """Return the frame that stands for the forecast in a trace, in the batch that it was made in."""
        return event_frame(batch, self.module, self.label, type(self).__name__, Note("forecast", str(self)))


def _usual_pause(batch: int) -> int:
    return min(max(_EVERY, batch // _LONGEST), _LONGEST)


class Forecaster:
    """Forecaster of overflows from the largest magnitudes of batches: from `next` on one is wanted."""

    def __init__(self) -> None:
        self.history = PeakHistory()
        self._dtypes: list[str] = []
        # By tensor: log2 of the largest number of its format; nan for what has none, and for an input, which counts at
        # the module that made it.
        self._ends: Floats = np.zeros(0)
        self._last = -1
        self._pause = _EVERY
        self._num_further = 0  # looks
        self._expected: tuple[float, float] | None = None  # the interval of the latest look, announced or not
        self._announced: list[tuple[int, Forecast]] = []  # with the batches that they were made in

    @property
    def next(self) -> int:
        """The batch from which on the next one is wanted."""
        last = self._last
        may_look = self._num_further < _FURTHER + last * _FURTHER_A_BATCH
        following = last + (self._pause if may_look else _usual_pause(last))
        return following if last >= _EVERY else min(following, 2 * last if last > 0 else last + 1)

    def add_names(self, names: Sequence[PeakName]) -> None:
        """Add the names of the next values, which come after those that were added before."""
        if names:
            self.history.add_names(names)
            self._dtypes += [dtype for _, _, dtype in names]
            known = [None if label.startswith("input[") else limits(dtype) for _, label, dtype in names]
            bits = [nan if ends is None else log2(ends.largest) for ends in known]
            self._ends = np.append(self._ends, bits)

    def end(self, batch: int, values: bytes) -> Forecast | None:
        """Take the values of a batch as Recorder.take_peaks gives them. Return the forecast that is new, if any."""
        since = batch - self._last
        if since <= 0:  # another thread's later batch was quicker
            return None
        self._num_further += since < _EVERY <= batch
        self._last = batch
        self.history.add(batch, np.frombuffer(values))
        batches, bits = self.history.rows()
        self._pause = usual = _usual_pause(batch)
        if len(batches) < 3:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            latest = self._ends - bits[-1]
            left = latest / (bits[-1] - bits[-2]) * (batches[-1] - batches[-2])
            soonest = float(np.where(left > 0, left, inf).min(initial=inf))
            is_low = latest <= _MOST_ROOM * (self._ends - np.fmin.reduce(bits))
        self._pause = int(max(1, min(usual, soonest / _LOOKS_TO_END)))
        if len(batches) < _FEWEST or not is_low.any():  # of nearly all models
            self._expected = None
            return None
        return self._first_to_end(batch, batches, self._ends - bits)

    def _first_to_end(self, batch: int, batches: Floats, headroom: Floats) -> Forecast | None:
        """Return the forecast of the tensor that ends first, where it is to be announced."""
        before, self._expected = self._expected, None
        left, *_ = fit(batches[-_POINTS[0] :], headroom[-_POINTS[0] :])
        if not (left.min(initial=inf) <= _REACH * batch):
            return None
        left, margin, loss = extrapolate(batches, headroom)
        with np.errstate(invalid="ignore"):
            is_near = (left >= _LEAST_LEFT) & (left <= _REACH * batch) & (2 * margin <= left)
            is_near &= headroom[-1] <= _MOST_ROOM * np.fmax.reduce(headroom)
        if not is_near.any():
            return None
        place = int(np.where(is_near, left, inf).argmin())
        middle, margin_of = batch + float(left[place]), max(1.0, float(margin[place]))
        self._expected = middle - margin_of, middle + margin_of
        if before is None or before[0] > middle + margin_of or before[1] < middle - margin_of:
            return None  # one look is not believed
        if not self._is_new(batch, middle, margin_of):
            return None
        names = self.history.names
        followers = {names[i][0] for i in np.flatnonzero(left <= 2 * (left[place] + margin_of))}
        num_followers = len(followers - {names[place][0]})
        bits, bits_lost = float(headroom[-1, place]), 100 * float(loss[place])
        replaces = self._announced[-1][1].batch if self._announced else None
        expected, dtype = (round(middle), round(margin_of)), self._dtypes[place]
        forecast = Forecast(*names[place], dtype, bits, bits_lost, *expected, num_followers, replaces)
        self._announced.append((batch, forecast))
        return forecast

    def _is_new(self, batch: int, middle: float, margin: float) -> bool:
        self._announced = [(at, forecast) for at, forecast in self._announced if batch - at < _LINES_IN]
        if not self._announced:
            return True
        last = self._announced[-1][1]
        has_changed = batch > last.batch + last.plus_minus
        has_changed = has_changed or abs(middle - last.batch) > max(last.plus_minus, margin)
        return has_changed and len(self._announced) < _MOST_LINES


def extrapolate(batches: Floats, headroom: Floats) -> tuple[Floats, Floats, Floats]:
    """Return when each column reaches 0, in batches after the last, the margin of that, and the bits lost a batch."""
    best: list[Floats] = []
    for size in _POINTS:
        window, points = batches[-size:], headroom[-size:]
        left, deviation, loss = fit(window, points)
        middle = len(window) // 2
        half, *_ = fit(window[-middle:], points[-middle:])
        with np.errstate(invalid="ignore"):
            bend = half - left
            left = left + _BEND * bend
            margin = np.hypot(_DEVIATIONS * deviation, _BEND_MARGIN * bend) + _LEAST_SHARE * left
            share = np.nan_to_num(margin / left, nan=inf)
        line = [left, margin, loss, share]
        is_better = share < best[3] if best else share < inf
        best = [np.where(is_better, new, old) for new, old in zip(line, best or line, strict=True)]
    return best[0], best[1], best[2]


def fit(batches: Floats, headroom: Floats) -> tuple[Floats, Floats, Floats]:
    """Fit a line to each column by least squares.

    Return how many batches after the last the line reaches 0 (inf where it does not fall, or with fewer than half
    of the points), the standard deviation of that, and the bits that it loses a batch.
    """
    is_known = np.isfinite(headroom)
    weights = is_known.astype(np.float64)
    bits, ahead = np.where(is_known, headroom, 0.0).astype(np.float64), batches - batches[-1]
    count, sum_x, sum_xx = np.stack([np.ones(len(ahead)), ahead, ahead * ahead]) @ weights
    sum_y, sum_xy = np.stack([np.ones(len(ahead)), ahead]) @ bits
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = sum_xx - sum_x * sum_x / count
        slope = (sum_xy - sum_x * sum_y / count) / spread
        at_end = (sum_y - slope * sum_x) / count
        left = -at_end / slope
        errors = np.where(is_known, bits - at_end - np.outer(ahead, slope), 0.0)
        variance = np.square(errors).sum(axis=0) / (count - 2)
        # The place where a line crosses 0 deviates as the line does there, over its slope.
        far = left - sum_x / count
        deviation = np.sqrt(variance * (1 + 1 / count + far * far / spread)) / -slope
    is_falling = (slope < 0) & (left > 0) & (count >= max(3, len(batches) // 2)) & is_known[-1]
    return np.where(is_falling, left, inf), np.where(is_falling, deviation, inf), -slope


# The history.

# The distance of a magnitude is how many bits it is above or below the median of the 8 steps before, so that a trend is
# no distance. A tensor leaves its history when its distance is so many deviations from the median of the 64 distances
# before. The deviation is robust: 1.48 times the median distance from that median, or the way from there to the 90 % or
# 10 % quantile where that is longer, as it is in a skewed or heavy-tailed history. docs/spikes.md states the rates of
# false alarms, and tests/unit/history/test_spikes_peaks.py measures them.

# Distances that a value's own is compared with, and the fewest of them. Values that a distance is measured from, and
# the fewest of them.
WINDOW, LEAST = 64, 32
LEVEL, LEAST_LEVEL = 8, 4
# Deviations at which a tensor counts, and the least deviation in bits (1.4 %).
CHANGED, LEAST_BITS = 8.0, 0.02
# A deviation of normal values by their median distance, and by the gap between median and 90 % quantile.
OF_DISTANCE, OF_QUANTILE = 1.4826, 1 / 1.2816
OF_CALL = re.compile(r"(output|input)(\[|\.|$)")  # labels of tensors that are neither weights nor buffers
DEPTH = WINDOW + LEVEL + 1
# Rows of a full history, and how many it drops.
ROWS, DROPPED = 96, 24


def _quantiles(values: Floats, fewest: int, *parts: float) -> list[Floats]:
    """Return these quantiles of the numbers in each column; nan for a column with too few."""
    ordered, count = np.sort(values, axis=0), np.isfinite(values).sum(axis=0)
    is_enough = count >= fewest
    last, columns = np.where(is_enough, count, 1) - 1, np.arange(values.shape[1])
    rows = (np.round(part * last).astype(np.intp) for part in parts)
    return [np.where(is_enough, ordered[row, columns], nan) for row in rows]


def _usual_bits(before: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the level of each tensor after these steps, and the median and the deviations of the distances."""
    windows = np.moveaxis(sliding_window_view(before, LEVEL, axis=0), -1, 0)
    levels = _quantiles(windows.reshape(LEVEL, -1), LEAST_LEVEL, 0.5)[0].reshape(windows.shape[1:])
    distances = before[LEVEL:] - levels[:-1]
    middle, low, high = _quantiles(distances, LEAST, 0.5, 0.1, 0.9)
    spread = np.fmax(OF_DISTANCE * _quantiles(np.abs(distances - middle), LEAST, 0.5)[0], LEAST_BITS)
    up, down = (np.fmax(spread, OF_QUANTILE * gap) for gap in (high - middle, middle - low))
    return levels[-1], middle, up, down


class PeakHistory:
    """Largest magnitudes of tensors in log2: a row for each step or batch, a column for each tensor.

    A magnitude of 0 counts as missing: a tensor that was not there and one that was all zero look alike. The rows are
    the latest 72 to 96 steps. A tensor takes 0.4 KiB.
    """

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []  # module and label
        self._bits: Floats = np.full((ROWS, 0), nan, np.float32)
        self._steps: Floats = np.zeros(ROWS)  # float32 cannot count past 2^24
        self._num_rows = 0
        # First and latest magnitudes, 0 for what was always missing.
        self._first: Floats = np.zeros(0)
        self._latest: Floats = np.zeros(0)

    def add_names(self, names: Sequence[PeakName]) -> None:
        """Add tensors, in the order of the forward or of the backward."""
        if not names:  # as in nearly all steps
            return
        self.names += [(module, label) for module, label, _ in names]
        more = len(self.names) - len(self._first)
        self._first, self._latest = (np.append(x, np.zeros(more)) for x in (self._first, self._latest))
        self._bits = np.pad(self._bits, ((0, 0), (0, more)), constant_values=nan)

    def add(self, step: int, values: Floats) -> None:
        """Take the magnitudes of a step, of which the latest names may be missing."""
        if self._num_rows == ROWS:
            for rows in (self._bits, self._steps):
                rows[:-DROPPED] = rows[DROPPED:].copy()
            self._num_rows -= DROPPED
        count = len(values)
        is_known = (values > 0) & (values < inf)  # the modulus of a complex number may be inf
        row = self._bits[self._num_rows]
        row[:] = nan
        np.log2(values, out=row[:count], where=is_known, casting="same_kind")
        self._steps[self._num_rows] = step
        self._num_rows += 1
        np.copyto(self._latest[:count], values, where=is_known)
        np.copyto(self._first[:count], values, where=is_known & (self._first[:count] == 0))

    def rows(self) -> tuple[Floats, Floats]:
        """Return the numbers of the steps and their magnitudes in bits, oldest first; nan for what was missing."""
        return self._steps[: self._num_rows], self._bits[: self._num_rows]

    def ends(self) -> list[tuple[tuple[str, str], float, float]]:
        """Return the names of the tensors that were there, with their first and their latest magnitude.

        Another thread may be adding a step.
        """
        magnitudes = zip(self.names, self._first.tolist(), self._latest.tolist(), strict=False)
        return [(name, first, latest) for name, first, latest in magnitudes if first]

    def departures(self, *, falls: bool = False) -> list[Departure]:
        """Return the tensors that left their history in the latest step, in their order; with `falls`, also downwards.

        A tensor that was always missing leaves it by coming. With `falls`, one that always was there leaves it by
        being zero, if other tensors of its module are there: else the module may not have been called.
        """
        rows = self._bits[max(0, self._num_rows - DEPTH) : self._num_rows]
        if len(rows) <= LEAST:
            return []
        before, latest = rows[:-1], rows[-1]
        level, middle, up, down = _usual_bits(before)
        distance = latest - level - middle
        far = np.where(distance > 0, distance / up, -distance / down if falls else 0.0)
        is_here = np.isfinite(latest)
        far[is_here & np.isnan(before).all(axis=0)] = inf
        if falls:
            called = {self.names[place][0] for place in np.flatnonzero(is_here)}
            for place in np.flatnonzero(~is_here & np.isfinite(before).all(axis=0)):
                far[place] = inf if self.names[place][0] in called else 0.0
        values, usual = (np.nan_to_num(np.exp2(bits)) for bits in (latest, level))
        numbers = np.stack((values, usual, far), 1).astype(float).tolist()
        return [Departure(*self.names[place], *numbers[place]) for place in np.flatnonzero(far >= CHANGED)]
