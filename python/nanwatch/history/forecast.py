"""Forecasts of overflow: which module will leave its format first, and in which batch.

A forecast is a least-squares line on log2 of a tensor's largest magnitudes. The forecaster never reads a clock, so two
runs of one seed make the same forecasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, log2, nan

import numpy as np

from ..numerics.formats import limits
from ..recording.events import PeakName
from ..records.record import Frame, Note, event_frame
from ..util.messages import module_name, visible
from .peaks import Floats, PeakHistory

# Looks: at batches 0, 1, 2, 4, 8 and every 16th, from batch 1,024 on after a 64th of the run, at most 64 batches apart.
# More often where the line through the latest two points ends soon. The further looks are at most 32 and one in eight
# batches. A look takes 0.2 to 0.3 ms, which in every 16th batch is a quarter of the cost of watching a small MLP.
_EVERY, _LONGEST = 16, 64
_FURTHER, _FURTHER_A_BATCH = 32, 1 / 8
_LOOKS_TO_END = 32
# Points of a line: the latest 16 or 24, whichever gives the narrowest interval. Noise asks for more of them, growth
# that bends for fewer.
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


@cache
def _end_bits(dtype: str) -> float:
    """Return log2 of the largest finite number of the format; nan for a dtype without limits."""
    ends = limits(dtype)
    return nan if ends is None else log2(ends.largest)


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
            ends = [nan if label.startswith("input[") else _end_bits(dtype) for _, label, dtype in names]
            self._ends = np.append(self._ends, ends)

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
        names = self.history.names
        if not self._is_new(batch, middle, margin_of):
            return None
        followers = {names[i][0] for i in np.flatnonzero(left <= 2 * (left[place] + margin_of))}
        module, label = names[place]
        forecast = Forecast(
            module,
            label,
            self._dtypes[place],
            float(headroom[-1, place]),
            100 * float(loss[place]),
            round(middle),
            round(margin_of),
            len(followers - {module}),
            self._announced[-1][1].batch if self._announced else None,
        )
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
        # Of the place where a line crosses 0: the variance of the line there, over its slope.
        far = left - sum_x / count
        deviation = np.sqrt(variance * (1 + 1 / count + far * far / spread)) / -slope
    is_falling = (slope < 0) & (left > 0) & (count >= max(3, len(batches) // 2)) & is_known[-1]
    return np.where(is_falling, left, inf), np.where(is_falling, deviation, inf), -slope
