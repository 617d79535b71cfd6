"""History of largest magnitudes for forecasts, spikes and suspicion, and the rule for a tensor that leaves its own.

The distance of a magnitude is how many bits it is above or below the median of the 8 steps before, so that a trend is
no distance. A tensor leaves its history when its distance is so many deviations from the median of the 64 distances
before. The deviation is robust: 1.48 times the median distance from that median, or the way from there to the 90 % or
10 % quantile where that is longer, as it is in a skewed or heavy-tailed history. docs/spikes.md states the rates of
false alarms, and tests/unit/history/test_peaks.py measures them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf, isfinite, nan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..recording.events import PeakName
from ..report.spike import Curve, Departure

Places: TypeAlias = "np.ndarray[Any, np.dtype[np.intp]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"

# Distances that a value's own is compared with, and the fewest of them; values that a distance is measured from, and
# the fewest of them.
WINDOW, LEAST = 64, 32
LEVEL, LEAST_LEVEL = 8, 4
# Deviations at which a tensor counts, and the least deviation in bits (1.4 %).
CHANGED, LEAST_BITS = 8.0, 0.02
# A weight that changes by such a factor in one step has been changed until it is back. Optimizers move it by less.
_SUDDEN = 2.0
OF_CALL = re.compile(r"(output|input)(\[|\.|$)")  # labels of tensors of a call that are no weights or buffers
# Deviations of normal values: their median distance, and the quantile of 90 %.
OF_DISTANCE, OF_QUANTILE = 1.4826, 1 / 1.2816
DEPTH = WINDOW + LEVEL + 1
# Rows that a full history drops. One that reaches back has fewer rows, joins the older ones by twos, and leaves the
# latest as close together as they came.
DROPPED = 24
ROWS, LATEST = 64, 24
_JOINED = ROWS - LATEST
# Batcher's sorting network for 8 numbers: pairs of them that are put in order one after the other.
_LOW = (0, 1, 4, 5, 0, 1, 2, 3, 0, 2, 4, 6, 2, 3, 1, 3, 1, 3, 5)
_HIGH = (2, 3, 6, 7, 4, 5, 6, 7, 1, 3, 5, 7, 4, 5, 4, 6, 2, 4, 6)
_TOGETHER = 8  # steps whose logarithms are taken at once


def _eight_sorted(values: Floats) -> Floats:
    """Return the 8 numbers in each column in order, nan as inf. numpy's sort takes 10 times as long for so few."""
    rows = list(np.where(np.isnan(values), inf, values))
    for i, j in zip(_LOW, _HIGH, strict=True):
        rows[i], rows[j] = np.minimum(rows[i], rows[j]), np.maximum(rows[i], rows[j])
    return np.array(rows)


def _quantiles(values: Floats, fewest: int, *parts: float) -> list[Floats]:
    """Return these quantiles of the numbers in each column; nan for a column with too few."""
    ordered = np.sort(values, axis=0) if len(values) != LEVEL else _eight_sorted(values)
    count = np.isfinite(values).sum(axis=0)
    has = count >= fewest
    last, columns = np.where(has, count, 1) - 1, np.arange(values.shape[1])
    return [np.where(has, ordered[np.round(part * last).astype(np.intp), columns], nan) for part in parts]


def usual(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the median of the numbers in each column, and their deviation upwards and downwards.

    They are nan for a column with too few numbers.
    """
    middle, low, high = _quantiles(values, LEAST, 0.5, 0.1, 0.9)
    distance = OF_DISTANCE * _quantiles(np.abs(values - middle), LEAST, 0.5)[0]
    up, down = (np.maximum(distance, OF_QUANTILE * way) for way in (high - middle, middle - low))
    return middle, up, down


def _usual_bits(before: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the level of each tensor after these steps, and the median and the deviations of the distances."""
    parts = np.moveaxis(sliding_window_view(before, LEVEL, axis=0), -1, 0)
    levels = _quantiles(parts.reshape(LEVEL, -1), LEAST_LEVEL, 0.5)[0].reshape(parts.shape[1:])
    middle, up, down = usual(before[LEVEL:] - levels[:-1])
    return levels[-1], middle, np.maximum(up, LEAST_BITS), np.maximum(down, LEAST_BITS)


class _Change(NamedTuple):
    """Sudden change of a weight: the step, the magnitude before, and the deviations of the change."""

    step: int
    before: float
    deviations: float


class PeakHistory:
    """Largest magnitudes of tensors over steps or batches, in log2: a row for each step, a column for each tensor.

    A magnitude of 0 counts as missing: a tensor that was not there and one that was all zero look alike.

    With `falls`, tensors also leave their histories downwards, and sudden changes of weights are remembered. With
    `reaches_back`, the rows reach back to the first step, ever further apart. Without it they are the latest steps.
    `room` is the number of tensors that memory is taken for at once: memory taken in the first batch would lie between
    its activations. A tensor takes 0.3 KiB, or 0.4 KiB in the latest steps.
    """

    def __init__(self, *, falls: bool = False, reaches_back: bool = False, room: int = 0) -> None:
        self.names: list[tuple[str, str]] = []  # module and label
        # First and latest magnitudes, 0 for what was always missing.
        self._first: Floats = np.zeros(0)
        self._latest: Floats = np.zeros(0)
        self._falls = falls
        self._reaches_back = reaches_back
        rows = ROWS if reaches_back else DEPTH + DROPPED
        self._bits: Floats = np.full((rows, room), nan, np.float32)
        self._steps: Floats = np.zeros(rows)  # float32 cannot count past 2^24
        self._num_rows = 0
        self._waiting: list[tuple[int, Floats]] = []  # the latest steps, which are cheaper to take together
        self._is_weight = np.zeros(0, np.bool_)  # or a buffer
        self._changes: dict[int, _Change] = {}

    def meet(self, names: Sequence[PeakName]) -> None:
        """Add tensors, in the order of the forward or of the backward."""
        if not names:  # as in nearly all steps
            return
        self._settle()
        self._first, self._latest = (
            np.append(one, np.zeros(len(names))) for one in (self._first, self._latest)
        )
        is_weight = [OF_CALL.match(label) is None for _, label, _ in names]
        self._is_weight = np.append(self._is_weight, np.array(is_weight, np.bool_))
        self.names += [(module, label) for module, label, _ in names]
        room = self._bits.shape[1]
        if len(self.names) > room:
            more = max(len(self.names), room * 5 // 4) - room
            self._bits = np.pad(self._bits, ((0, 0), (0, more)), constant_values=nan)

    def add(self, step: int, values: Floats) -> None:
        """Take the magnitudes of a step."""
        self._waiting.append((step, values))
        if self._reaches_back or len(self._waiting) == _TOGETHER:
            self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        steps, waiting = zip(*self._waiting, strict=True)
        values, self._waiting = np.array(waiting), []
        # The modulus of a complex number may be inf.
        is_here = (values > 0) & (values < inf)
        if self._num_rows + len(values) > len(self._bits):
            self._make_room()
        rows = slice(self._num_rows, self._num_rows + len(values))
        bits = self._bits[rows, : values.shape[1]]
        bits[:] = nan
        np.log2(values, out=bits, where=is_here)
        self._steps[rows] = steps
        self._num_rows += len(values)
        known = [self._latest]
        for row, here in zip(values, is_here, strict=True):
            known.append(np.where(here, row, known[-1]))
        self._latest = known[-1]
        new = np.flatnonzero(self._first == 0)
        self._first[new] = np.where(is_here, values, 0.0)[is_here[:, new].argmax(axis=0), new]
        if self._falls:
            self._note_changes(np.array(known))

    def _make_room(self) -> None:
        """Drop or join rows of a full history."""
        for rows in (self._bits, self._steps):
            if self._reaches_back:
                old, rest = rows[:_JOINED], rows[_JOINED : self._num_rows]
                pairs = (
                    np.fmin(old[::2], old[1::2]),
                    np.fmax(old[::2], old[1::2]),
                )  # of a missing one, the other
                kept = np.concatenate([(pairs[0] + pairs[1]) / 2, rest])
            else:
                kept = rows[DROPPED : self._num_rows].copy()
            rows[: len(kept)] = kept
        self._num_rows = len(kept)

    def _note_changes(self, known: Floats) -> None:
        """Remember the weights that left their histories in one step, unless they have changed before."""
        before, after = known[:-1], known[1:]
        moved = (after >= _SUDDEN * before) | (before >= _SUDDEN * after)
        moved &= (before > 0) & self._is_weight
        if not moved.any():
            return
        for i in np.flatnonzero(moved.any(axis=1)).tolist():
            ago = len(moved) - 1 - i
            places = np.flatnonzero(moved[i])
            rows = self._recent(ago)[:, places]
            if len(rows) <= LEAST:
                continue
            far = self._distances(rows)[1]
            for place, deviations in zip(places.tolist(), far.tolist(), strict=True):
                if deviations >= CHANGED:
                    step = int(self._steps[self._num_rows - 1 - ago])
                    self._changes.setdefault(place, _Change(step, float(before[i, place]), deviations))

    def rows(self) -> tuple[Floats, Floats]:
        """Return the numbers of the steps and their magnitudes in bits, oldest first; nan for what was missing."""
        self._settle()
        return self._steps[: self._num_rows], self._bits[: self._num_rows, : len(self.names)]

    def latest(self) -> list[tuple[tuple[str, str], float]]:
        """Return the names of the tensors in the latest step, with their magnitudes."""
        row = self.rows()[1][-1].tolist()
        return [(name, 2.0**bits) for name, bits in zip(self.names, row, strict=True) if bits == bits]

    def ends(self) -> list[tuple[tuple[str, str], float, float]]:
        """Return the names of the tensors that were there, with their first and their latest magnitude.

        Another thread may be adding a step.
        """
        known = zip(self.names, self._first.tolist(), self._latest.tolist(), strict=False)
        return [(name, first, latest) for name, first, latest in known if first]

    def _recent(self, ago: int = 0) -> Floats:
        """Return the rows that the latest step is judged by, without the latest `ago` of them."""
        return self._bits[max(0, self._num_rows - DEPTH) : self._num_rows - ago, : len(self.names)]

    def changed(self) -> list[tuple[Departure, int]]:
        """Return the weights that changed suddenly and are not back, and how many steps ago that was."""
        steps, _ = self.rows()
        found = []
        for place, change in list(self._changes.items()):
            latest = float(self._latest[place])
            if 1 / _SUDDEN < latest / change.before < _SUDDEN:
                del self._changes[place]
            else:
                departure = Departure(*self.names[place], latest, change.before, change.deviations)
                found.append((departure, int(steps[-1]) - change.step))
        return found

    def limits(self, places: Places) -> tuple[Floats, Floats]:
        """Return the magnitudes that are usual for the tensors at these places, and those beyond their histories.

        They are 0 for one that was always missing.
        """
        self._settle()
        before = self._recent()[:, places]
        if len(before) <= LEAST:
            return np.full(len(places), nan), np.full(len(places), inf)
        level, middle, deviation, _ = _usual_bits(before)
        limits = np.nan_to_num(level + middle + CHANGED * deviation, nan=inf).astype(np.float64)
        missing = np.isnan(before).all(axis=0)
        return np.where(missing, 0.0, np.exp2(level)), np.where(missing, 0.0, np.exp2(limits))

    def departures(self, ago: int = 0) -> list[Departure]:
        """Return the tensors that left their history in the latest step, or so many before it, in their order."""
        self._settle()
        rows = self._recent(ago)
        if len(rows) <= LEAST:
            return []
        levels, far = self._distances(rows)
        values = np.nan_to_num(2.0 ** rows[-1])
        if self._falls:
            far[self._zeroed(rows)] = inf
        return [
            Departure(*self.names[i], float(values[i]), float(levels[i]), float(far[i]))
            for i in np.flatnonzero(far >= CHANGED)
        ]

    def largest(self) -> dict[tuple[str, str], float]:
        """Return the largest magnitude of each tensor in the steps before the latest."""
        self._settle()
        bits = np.nan_to_num(self._recent(1), nan=-inf).max(axis=0, initial=-inf)
        return dict(zip(self.names, np.exp2(bits).tolist(), strict=True))

    def _distances(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return the usual magnitudes before the last row, and how many deviations it is from them."""
        before, latest = rows[:-1], rows[-1]
        level, middle, up, down = _usual_bits(before)
        distance = latest - level - middle
        far = np.where(distance > 0, distance / up, -distance / down if self._falls else 0.0)
        far[np.isfinite(latest) & np.isnan(before).all(axis=0)] = inf
        return np.nan_to_num(2.0**level), far

    def _zeroed(self, rows: Floats) -> Places:
        """Return the tensors that are missing for the first time in a step that has others of their module."""
        is_here = np.isfinite(rows[-1])
        modules = {self.names[i][0] for i in np.flatnonzero(is_here)}
        gone = np.flatnonzero(~is_here & np.isfinite(rows[:-1]).all(axis=0))
        return np.array([i for i in gone if self.names[i][0] in modules], np.intp)

    def curve(self, name: tuple[str, str]) -> Curve:
        """Return the latest values of a tensor, oldest first."""
        self._settle()
        return Curve(*name, spelt(self._recent()[:, self.names.index(name)].tolist(), True))


def spelt(values: Iterable[float], in_bits: bool) -> tuple[float | None, ...]:
    """Return the values of a curve, None for those that are not finite."""
    return tuple(None if not isfinite(x) else 2.0**x if in_bits else x for x in values)
