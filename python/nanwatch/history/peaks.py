"""History of largest magnitudes for forecasts, spikes and suspicion, and the rule for a tensor that leaves its own.

The distance of a magnitude is how many bits it is above or below the median of the 8 steps before, so that a trend is
no distance. A tensor leaves its history when its distance is so many deviations from the median of the 64 distances
before. The deviation is robust: 1.48 times the median distance from that median, or the way from there to the 90 % or
10 % quantile where that is longer, as it is in a skewed or heavy-tailed history. docs/spikes.md states the rates of
false alarms, and tests/unit/history/test_peaks.py measures them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, isfinite, nan
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..recording.events import PeakName
from ..report.spike import Curve, Departure

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

    def meet(self, names: Sequence[PeakName]) -> None:
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
        known = zip(self.names, self._first.tolist(), self._latest.tolist(), strict=False)
        return [(name, first, latest) for name, first, latest in known if first]

    def _recent(self) -> Floats:
        return self._bits[max(0, self._num_rows - DEPTH) : self._num_rows]

    def departures(self, *, falls: bool = False) -> list[Departure]:
        """Return the tensors that left their history in the latest step, in their order; with `falls`, also downwards.

        A tensor that was always missing leaves it by coming. With `falls`, one that always was there leaves it by
        being zero, if other tensors of its module are there: else the module may not have been called.
        """
        rows = self._recent()
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

    def curve(self, name: tuple[str, str]) -> Curve:
        """Return the latest values of a tensor, oldest first."""
        values = np.exp2(self._recent()[:, self.names.index(name)]).tolist()
        return Curve(*name, tuple(value if isfinite(value) else None for value in values))
