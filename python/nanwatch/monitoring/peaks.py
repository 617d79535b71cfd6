"""Histories of magnitudes over the steps of a run, and the rule for a tensor that leaves its own.

The distance of a magnitude is how many bits it is above or below the median of the 8 steps before, so that a trend is
no distance. A tensor leaves its history when its distance is so many deviations from the median of the 64 distances
before. The deviation is robust: 1.48 times the median distance from that median, or the way from there to the 90 % or
10 % quantile where that is longer, as it is in a skewed or heavy-tailed history. docs/spikes.md states the rates of
false alarms, and tests/unit/monitoring/test_peaks.py measures them.
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
# A weight that changes by so many bits in one step has been changed until it is back. Optimizers move it by less.
SUDDEN = 1.0
OF_CALL = re.compile(r"(output|input)(\[|\.|$)")  # labels of tensors of a call that are no weights or buffers
# Deviations of normal values: their median distance, and the quantile of 90 %.
OF_DISTANCE, OF_QUANTILE = 1.4826, 1 / 1.2816
DEPTH = WINDOW + LEVEL + 1
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
    up, down = (np.maximum(distance, OF_QUANTILE * one) for one in (high - middle, middle - low))
    return middle, up, down


class Change(NamedTuple):
    """Sudden change of a weight: the step, counted from the first, its bits before, and the deviations of the step."""

    step: int
    before: float
    deviations: float


class Histories:
    """Magnitudes of tensors over the latest steps, in bits. 350 bytes a tensor.

    A magnitude of 0 counts as missing: a tensor that was not there and one that was all zero look alike. With
    `falls`, tensors also leave their histories downwards, and sudden changes of weights are remembered.
    """

    def __init__(self, *, falls: bool = False) -> None:
        self.names: list[tuple[str, str]] = []
        self.first: Floats = np.zeros(0)
        self._falls = falls
        self._bits: Floats = np.zeros((DEPTH, 0), np.float32)
        self._count = 0
        self._waiting: list[Floats] = []  # magnitudes of the latest steps, which are cheaper to take together
        self._weights: Places = np.zeros(0, np.intp)  # and buffers
        self._known: Floats = np.zeros(0, np.float32)  # latest bits of these
        self._changes: dict[int, Change] = {}

    def meet(self, names: Sequence[PeakName]) -> None:
        """Add tensors, in the order of the forward or of the backward."""
        if not names:  # as in nearly all steps
            return
        self._settle()
        self.names += [(module, label) for module, label, _ in names]
        self._bits = np.pad(self._bits, ((0, 0), (0, len(names))), constant_values=nan)
        self.first = np.append(self.first, np.full(len(names), nan))
        if self._falls:
            weights = [i for i, (_, label) in enumerate(self.names) if OF_CALL.match(label) is None]
            new = np.full(len(weights) - len(self._weights), nan, np.float32)
            self._weights, self._known = np.array(weights, np.intp), np.append(self._known, new)

    def add(self, values: Floats) -> None:
        """Take the magnitudes of a step."""
        self._waiting.append(values)
        if len(self._waiting) == _TOGETHER:
            self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        values, self._waiting = np.array(self._waiting), []
        bits = np.full(values.shape, nan, np.float32)
        np.log2(values, out=bits, where=values > 0)
        for row in bits[: max(0, WINDOW - self._count)]:
            self.first = np.where(np.isnan(self.first), row, self.first)
        self._bits[(self._count + np.arange(len(bits))) % DEPTH] = bits
        self._count += len(bits)
        for i, row in enumerate(bits[:, self._weights] if len(self._weights) else ()):
            moved = np.abs(row - self._known) >= SUDDEN
            if moved.any():
                self._note_changes(self._count - len(bits) + i, self._weights[moved], self._known[moved])
            self._known = np.where(np.isnan(row), self._known, row)

    def _note_changes(self, step: int, places: Places, before: Floats) -> None:
        """Remember the weights that left their histories in a step at once, unless they have changed before."""
        rows = self._in_order(places)
        rows = rows[: len(rows) - (self._count - 1 - step)]
        if len(rows) <= LEAST:
            return
        far = self._distances(rows)[1]
        for place, known, one in zip(places.tolist(), before.tolist(), far.tolist(), strict=True):
            if one >= CHANGED:
                self._changes.setdefault(place, Change(step, known, one))

    def changed(self) -> list[tuple[Departure, int]]:
        """Return the weights that changed suddenly and are not back, and how many steps ago that was."""
        self._settle()
        latest = dict(zip(self._weights.tolist(), self._known.tolist(), strict=True))
        found = []
        for place, one in list(self._changes.items()):
            if abs(latest[place] - one.before) < SUDDEN:
                del self._changes[place]
            else:
                numbers = 2.0 ** latest[place], 2.0**one.before, one.deviations
                found.append((Departure(*self.names[place], *numbers), self._count - 1 - one.step))
        return found

    def latest(self) -> Floats:
        """Return the bits of the latest step; nan where a tensor was missing."""
        self._settle()
        row: Floats = self._bits[(self._count - 1) % DEPTH]
        return row

    def limits(self, places: Places) -> tuple[Floats, Floats]:
        """Return the magnitudes that are usual for the tensors at these places, and those beyond their histories.

        They are 0 for one that was always missing.
        """
        before = self._in_order(places)
        if self._count <= LEAST:
            return np.full(len(places), nan), np.full(len(places), inf)
        level, middle, deviation, _ = self._usual(before)
        limits = np.nan_to_num(level + middle + CHANGED * deviation, nan=inf).astype(np.float64)
        missing = np.isnan(before).all(axis=0)
        return np.where(missing, 0.0, np.exp2(level)), np.where(missing, 0.0, np.exp2(limits))

    def departures(self, ago: int = 0) -> list[Departure]:
        """Return the tensors that left their history in the latest step, or so many before it, in their order."""
        self._settle()
        if self._count - ago <= LEAST:
            return []
        rows = self._in_order()[: -ago or None]
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
        bits = np.nan_to_num(self._in_order()[:-1], nan=-inf).max(axis=0, initial=-inf)
        return dict(zip(self.names, np.exp2(bits).tolist(), strict=True))

    def _distances(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return the usual magnitudes before the last row, and how many deviations it is from them."""
        before, latest = rows[:-1], rows[-1]
        level, middle, up, down = self._usual(before)
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

    def _in_order(self, places: Places | slice = slice(None)) -> Floats:
        """Return the steps, oldest first."""
        self._settle()
        return np.roll(self._bits[:, places], -(self._count % DEPTH), axis=0)[-min(self._count, DEPTH) :]

    @staticmethod
    def _usual(before: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the level of each tensor after these steps, and the median and the deviations of the distances."""
        parts = np.moveaxis(sliding_window_view(before, LEVEL, axis=0), -1, 0)
        levels = _quantiles(parts.reshape(LEVEL, -1), LEAST_LEVEL, 0.5)[0].reshape(parts.shape[1:])
        middle, up, down = usual(before[LEVEL:] - levels[:-1])
        return levels[-1], middle, np.maximum(up, LEAST_BITS), np.maximum(down, LEAST_BITS)

    def curve(self, name: tuple[str, str]) -> Curve:
        """Return the latest values of a tensor, oldest first."""
        return Curve(*name, spelt(self._in_order()[:, self.names.index(name)].tolist(), True))


def spelt(values: Iterable[float], in_bits: bool) -> tuple[float | None, ...]:
    """Return the values of a curve, None for those that are not finite."""
    return tuple(None if not isfinite(x) else 2.0**x if in_bits else x for x in values)
