"""History of largest magnitudes for forecasts, spikes and suspicion, and the rule for a tensor that leaves its own.

The distance of a magnitude is how many bits it is above or below the median of the 8 steps before, so that a trend is
no distance. A tensor leaves its history when its distance is so many deviations from the median of the 64 distances
before. The deviation is robust: 1.48 times the median distance from that median, or the way from there to the 90 % or
10 % quantile where that is longer, as it is in a skewed or heavy-tailed history. docs/spikes.md states the rates of
false alarms, and tests/unit/history/test_peaks.py measures them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from math import inf, isfinite, log2, nan
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..recording.events import PeakName
from ..report.events import Departure

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"

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
    return [
        np.where(is_enough, ordered[np.round(part * last).astype(np.intp), columns], nan) for part in parts
    ]


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
        return [
            Departure(*self.names[place], float(values[place]), float(usual[place]), float(far[place]))
            for place in np.flatnonzero(far >= CHANGED)
        ]


# The rule for a loss or a gradient norm that jumps is that of a tensor, upwards alone. Distances of a loss are also
# judged as shares of its level, so that a loss that has fallen by a factor of ten has one history. By these alone more
# deviations are needed, because small losses have heavy tails.

# Deviations at which a loss or the gradients jump; those of gradients that are at least 4 times their level; those of a
# loss by shares of its level alone.
_JUMP, _JUMP_OF_FOUR, _JUMP_OF_SHARE = 12.0, 10.0, 30.0
# A level below this share of the first one counts as that: there a loss differs by factors.
_FLOOR = 0.02
# The least deviation of a loss, as a share of its level and of its first level. That of distances over the level, as a
# share of the first level. By these alone it jumps by at least 5 % of the first level.
_LEAST_SHARE, _LEAST_OF_FIRST, _LEAST_JUMP = 0.01, 0.001, 0.05


class Signal:
    """One number of each step that may jump: the loss, or the size of the gradients in bits."""

    def __init__(self, label: str, *, in_bits: bool) -> None:
        self._label = label
        self._in_bits = in_bits
        self._latest: deque[float] = deque(maxlen=LEVEL)
        self._distances: deque[float] = deque(maxlen=WINDOW)
        self._shares: deque[float] = deque(maxlen=WINDOW)  # distances over the level
        self._first = 0.0  # level

    def add(self, value: float) -> Departure | None:
        """Take the value of a step. Return its departure if it has jumped."""
        value = log2(value) if self._in_bits and value > 0 else value
        if not isfinite(value):
            return None
        departure = None
        if len(self._latest) == LEVEL:
            level = median(self._latest)
            self._first = self._first or abs(level)
            unit = 1.0 if self._in_bits else max(abs(level), _FLOOR * self._first) or 1.0
            distance = value - level
            if distance > 0 and len(self._shares) >= LEAST:
                departure = self._judge(value, level, unit)
            self._distances.append(distance)
            self._shares.append(distance / unit)
        self._latest.append(value)
        return departure

    def _judge(self, value: float, level: float, unit: float) -> Departure | None:
        distance, size, first = value - level, abs(level), self._first
        if self._in_bits:
            far = _deviations(self._distances, distance, LEAST_BITS)
            is_jump = far >= _JUMP or (far >= _JUMP_OF_FOUR and distance >= 2)
            value, level = 2.0**value, 2.0**level
        else:
            plain = _deviations(self._distances, distance, _LEAST_SHARE * max(size, first) or LEAST_BITS)
            least = max(_LEAST_SHARE * size, _LEAST_OF_FIRST * first) or LEAST_BITS
            share = _deviations(self._shares, distance / unit, least / unit)
            far = max(plain, share)
            is_jump = plain >= _JUMP or (share >= _JUMP_OF_SHARE and distance >= _LEAST_JUMP * first)
        return Departure("", self._label, value, level, far) if is_jump else None


def _deviations(before: Sequence[float], distance: float, least: float) -> float:
    """Return how many deviations a distance is above those before, where a deviation is at least this."""
    ordered, last = sorted(before), len(before) - 1
    middle, high = (ordered[round(part * last)] for part in (0.5, 0.9))
    spread = OF_DISTANCE * sorted(abs(x - middle) for x in ordered)[round(0.5 * last)]
    return (distance - middle) / max(spread, OF_QUANTILE * (high - middle), least)
