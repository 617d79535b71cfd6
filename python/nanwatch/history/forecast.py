"""Forecasts of overflow: which module will leave its format first, and in which batch.

The forecaster never asks for the time, so two runs of one seed make the same forecasts. It counts the batches that it
looks at, which bounds their cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import cosh, exp, inf, log, log2, nan, sinh, sqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..numerics.formats import limits
from ..recording.events import PeakName
from ..records.note import Note
from ..records.record import Frame, event_frame
from ..util.visible import module_name, visible
from .peaks import ROWS, Floats, PeakHistory

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

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
# A forecast is neither further ahead than 0.6 of the span, nor sooner than 2 batches.
_REACH = 0.6
_LEAST_LEFT = 2
# No forecast while more than a third of the headroom is left: growth that will stop looks like growth that will not.
_MOST_ROOM = 1 / 3
# Lines in so many batches.
_MOST_LINES = 3
_LINES_IN = 10_000


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


class Forecaster:
    """Forecaster of overflows from the largest magnitudes of some batches. Keeps 0.3 KiB for each tensor.

    `is_due(batch)` says whether a batch is wanted. `room`: how many tensors there may be.
    """

    def __init__(self, room: int = 0) -> None:
        self.history = PeakHistory(reaches_back=True, room=room)
        self._dtypes: list[str] = []
        # By tensor: log2 of the largest number of its format; nan for what has none, and for an input, which counts at
        # the module that made it.
        self._ends: Floats = np.empty(0, np.float32)
        self._last = -1
        self._pause = 1
        self._spared = float(_SPARED)
        self._expected: tuple[float, float] | None = None  # the interval of the latest look, told or not
        self._told: list[tuple[int, Forecast]] = []  # with the batches that they were told in

    def is_due(self, batch: int) -> bool:
        """Return whether this batch is wanted."""
        since = batch - self._last
        return since >= _MOST_BATCHES or (
            since >= self._pause and self._spared + since * _SPARED_A_BATCH >= 1
        )

    def meet(self, names: Sequence[PeakName]) -> None:
        """Add the names of the next values, which come after those that were added before."""
        if not names:
            return
        self.history.meet(names)
        self._dtypes += [dtype for _, _, dtype in names]
        ends = [nan if label.startswith("input[") else _end_bits(dtype) for _, label, dtype in names]
        self._ends = np.append(self._ends, np.array(ends, np.float32))

    def end(self, batch: int, values: bytes) -> list[Forecast]:
        """Take the values of a finished batch. Return the new forecasts, at most one.

        `values` are the largest magnitudes as Recorder.take_peaks gives them.
        """
        since = batch - self._last
        if since <= 0:  # another thread's later batch was quicker
            return []
        self._spared = max(0.0, min(_SPARED, self._spared + since * _SPARED_A_BATCH) - 1)
        self._last = batch
        self.history.add(batch, np.frombuffer(values))
        batches, magnitudes = self.history.rows()
        tensors = np.flatnonzero(np.isfinite(self._ends - magnitudes[-1]))
        headroom = (self._ends - magnitudes)[:, tensors]
        bits, losses, late, spans = falls(batches, headroom)
        with np.errstate(divide="ignore", invalid="ignore"):
            left, soonest = (np.where(loss > 0, bits / loss, inf) for loss in (losses, np.fmax(losses, late)))
        falling = np.flatnonzero(left <= _FOLLOWED * spans)
        falling = falling[np.argsort(left[falling], kind="stable")]
        usual = min(_MOST_BATCHES, max(1, batch // ROWS))
        self._pause = max(1, int(min(usual, soonest.min(initial=inf) / _LOOKS_TO_END)))
        if not len(falling):
            self._expected = None
            return []
        leader = self._leader(batch, batches, headroom[:, falling[:_MOST_FITS]])
        if leader is None:
            return []
        place, middle, margin = leader
        row = falling[place]
        names = self.history.names
        followers = {names[tensors[i]][0] for i in falling if left[i] <= 2 * (middle + margin - batch)}
        module, label = names[tensors[row]]
        forecast = Forecast(
            module,
            label,
            self._dtypes[tensors[row]],
            float(bits[row]),
            100 * float(losses[row]),
            round(middle),
            max(1, round(margin)),
            len(followers - {module}),
            self._told[-1][1].batch if self._told else None,
        )
        self._told.append((batch, forecast))
        return [forecast]

    def _leader(self, batch: int, batches: Floats, headroom: Floats) -> tuple[int, float, float] | None:
        """Return which column of `headroom` ends first, the batch and the margin, where that is to be told."""
        found = None
        for place, column in enumerate(headroom.T):
            is_here = np.isfinite(column)
            points = batches[is_here], column[is_here].astype(float)
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


_FEW = 5  # points of a median


def falls(batches: Floats, headroom: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return for each column: its bits now, the loss a batch, the late loss a batch, how far back its points reach.

    Lines go through the medians of five points: the latest, and those before the middle, or just before the latest.
    """
    is_missing = np.isnan(headroom)
    count: int | Numbers = len(headroom)
    at = batches
    if is_missing.any():
        # The rows in which a column has a point come first.
        count = len(headroom) - is_missing.sum(axis=0)
        order = np.argsort(is_missing, axis=0, kind="stable")
        headroom, at = np.take_along_axis(headroom, order, axis=0), batches[order]

    def median(first: int | Numbers) -> tuple[Floats, Floats]:
        """Return the median of five points from this one, and their mean batch."""
        # np.clip asks for the ends of the dtype, which takes as long as the rest of this.
        rows = np.minimum(np.maximum(np.add.outer(np.arange(_FEW), first), 0), len(headroom) - 1)
        points = rows if rows.ndim == 1 else (rows, np.arange(rows.shape[1]))
        return np.sort(headroom[points], axis=0)[_FEW // 2], at[points].mean(axis=0)

    bits, now = median(count - _FEW)
    with np.errstate(divide="ignore", invalid="ignore"):
        losses, late = (
            (then - bits) / (now - at)
            for then, at in (median(count * 3 // 8 - _FEW // 2), median(count - 2 * _FEW))
        )
    return bits, losses, late, batches[-1] - np.broadcast_to(at[0], bits.shape)


# When a growing magnitude reaches the end of its format: many models of growth, weighed by back-tests.
#
# Optimizers make magnitudes grow in few ways. Steps of one size (Adam, Lion) let a weight grow in a straight line, and
# an output as a power of that line. A learning rate that is too high lets both grow by a constant factor. Growth that
# ends slows down. One family holds all of these: a power of the magnitude grows in a straight line (the transformation
# of Box and Cox, JRSS B 1964). The power is 1 for a weight under Adam, 1/p for a product of p such weights, 0 for a
# constant factor, below 0 for growth that speeds up, above 1 for growth that slows down.
#
# A model is such a power and the window of points that its line is laid through. Each model has to foretell the latest
# points of its window from the earlier ones. The errors of these back-tests weigh the models and give the uncertainty.

LEAST_POINTS = 12
POWERS = np.array([2, 1, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 12, 1e-9, -1 / 12, -1 / 6])
# Windows reach from the latest point so far back: all of the time, half of it, a quarter.
_WINDOWS = (1.0, 0.5, 0.25)
# Back-tests lay the line through the first 55 % of a window's points, through 65 %, ...; the last line is the forecast.
_CUTS = (0.55, 0.65, 0.75, 0.85, 1.0)
# The ends of a line are the thirds of its points, each by the quantile of its headroom: what overflows first is a batch
# with less headroom than most.
_QUANTILE = 0.3
# Errors are logarithms of times: a back-test that is 5 times too late says no more than one 7 times too late.
_MOST_ERROR = 2.0
# An error of a back-test below 0.15 is luck: models do not differ by it.
_LUCK = 0.15
# Models that see no end within 10^8 batches may have a tenth of the weight.
_NEVER = log(1e8)
_MOST_NEVER = 0.1


class Ending(NamedTuple):
    """The overflow comes in `left` batches, give or take a factor of exp(`deviation`) (one standard deviation)."""

    left: float
    deviation: float


def ending(batches: Floats, bits: Floats) -> Ending | None:
    """Foretell when `bits` of headroom reach 0, from points with the oldest first; None for "never" or "unknown"."""
    if len(batches) < LEAST_POINTS:
        return None
    now = float(batches[-1])
    spans = now - np.array(_WINDOWS) * (now - batches[0])
    starts = np.unique(np.minimum(np.searchsorted(batches, spans), len(batches) - LEAST_POINTS))
    lines = [_ends_of_line(batches[start:], bits[start:], cut) for start in starts for cut in _CUTS]
    # By window, cut and power. The three points of a line: its two ends, and the one that it has to foretell.
    shape = (len(starts), len(_CUTS), 1)
    points = np.array(lines).reshape(*shape, 6)
    first, last, held = (points[..., i] for i in (0, 2, 4))
    low, high, goal = (np.expm1(-log(2) * POWERS * points[..., i]) / POWERS for i in (1, 3, 5))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        slope = (high - low) / (last - first)
        ahead = np.where(slope > 0, (goal - high) / slope, np.inf)
        errors = np.log(np.where(ahead > 0, ahead, 0) / (held - last))[:, :-1]
        left = np.log(np.clip(ahead[:, -1] + last[:, -1] - now, 0.5, None))
    errors = np.clip(np.nan_to_num(errors, nan=_MOST_ERROR), -_MOST_ERROR, _MOST_ERROR)
    squares = np.square(errors).mean(axis=1)
    # A power that fits one window by chance fails in the others, as a window of noise fails with most powers.
    by_power, by_window = squares.mean(axis=0, keepdims=True), squares.mean(axis=1, keepdims=True)
    weights = 1 / ((_LUCK**2 + squares) * (_LUCK**2 + by_power) * (_LUCK**2 + by_window))
    weights /= weights.sum()
    if float(weights[~(left < _NEVER)].sum()) > _MOST_NEVER:
        return None
    left = np.fmin(left, _NEVER)
    mean = float((weights * left).sum())
    return Ending(exp(mean), sqrt(float((weights * (squares + np.square(left - mean))).sum())))


def _ends_of_line(batches: Floats, bits: Floats, cut: float) -> tuple[float, ...]:
    """Return the first and the last third of the points before the cut, and what is to be foretold."""
    count = len(batches)
    known = round(cut * count)
    third = known // 3
    held = max(2, (count - known) // 2)
    goal = (float(batches[-1]), 0.0) if cut == 1 else _middle(batches[-held:], bits[-held:])
    return (
        *_middle(batches[:third], bits[:third]),
        *_middle(batches[known - third : known], bits[known - third : known]),
        *goal,
    )


def _middle(batches: Floats, bits: Floats) -> tuple[float, float]:
    """Return the quantile of the bits, and the batch at which bits that fall without noise are there."""
    place = _QUANTILE * (len(bits) - 1)
    below = int(place)
    part = place - below
    ordered = np.sort(bits)
    left, right = batches[-1 - below], batches[-2 - below]
    return float(left + part * (right - left)), float(
        ordered[below] + part * (ordered[below + 1] - ordered[below])
    )
