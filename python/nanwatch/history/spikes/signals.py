"""The rule for a loss or a gradient norm that jumps.

A jump is judged like a departure of a tensor (../peaks.py), upwards alone. Distances of a loss are also judged as
shares of its level, so that a loss that has fallen by a factor of ten has one history. By these alone more deviations
are wanted: small losses have heavy tails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isfinite, log2
from statistics import median
from typing import NamedTuple

import numpy as np

from ...report.spike import Curve, Departure
from ..peaks import DEPTH, LEAST, LEAST_BITS, LEVEL, OF_QUANTILE, WINDOW, spelt, usual

# Deviations at which a loss or the gradients jump; those of gradients that are at least 4 times their level; those of a
# loss by shares of its level alone; and those of either where a cause is seen beside it.
_JUMP, _JUMP_OF_FOUR, _JUMP_OF_SHARE, _SUPPORTED = 12.0, 10.0, 30.0, 5.0
# A level below this share of the first one counts as that: there a loss differs by factors.
_FLOOR = 0.02
# The least deviation of a loss, as a share of its level and of its first level. That of distances over the level, as a
# share of the first level; by these alone it jumps by at least 5 % of the first level.
_LEAST_SHARE, _LEAST_OF_FIRST, _LEAST_JUMP = 0.01, 0.001, 0.05


class Jump(NamedTuple):
    """Departure of a loss or of the gradients; one that is not `certain` counts where its cause is seen."""

    departure: Departure
    certain: bool


class Signal:
    """One number of each step that may jump: the loss, or the size of the gradients in bits."""

    def __init__(self, label: str, *, in_bits: bool) -> None:
        self._label = label
        self._in_bits = in_bits
        self._latest: deque[float] = deque(maxlen=DEPTH)
        self._distances: deque[float] = deque(maxlen=WINDOW)
        self._shares: deque[float] = deque(maxlen=WINDOW)  # distances over the level
        self._first = 0.0  # level

    def add(self, value: float) -> Jump | None:
        """Take the value of a step. Return its departure if it may have jumped."""
        value = log2(value) if self._in_bits and value > 0 else value
        if not isfinite(value):
            return None
        found = None
        if len(self._latest) >= LEVEL:
            level = median(list(self._latest)[-LEVEL:])
            self._first = self._first or abs(level)
            unit = 1.0 if self._in_bits else max(abs(level), _FLOOR * self._first) or 1.0
            distance = value - level
            if distance > 0 and len(self._shares) >= LEAST:
                found = self._judge(value, level, unit)
            self._distances.append(distance)
            self._shares.append(distance / unit)
        self._latest.append(value)
        return found

    def _judge(self, value: float, level: float, unit: float) -> Jump | None:
        share = (value - level) / unit
        least = self._least(_LEAST_SHARE * abs(level), _LEAST_OF_FIRST * self._first) / unit
        ordered = sorted(self._shares)
        middle, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.5, 0.9))
        # In nearly all steps: the deviation is at least this, and numpy takes 60 µs for it.
        if share - middle < _SUPPORTED * max(OF_QUANTILE * (high - middle), least):
            return None
        of_share = _far(self._shares, share, least)
        if of_share < _SUPPORTED:
            return None
        least = self._least(_LEAST_SHARE * abs(level), _LEAST_SHARE * self._first)
        distance = value - level
        far = _far(self._distances, distance, least)
        if self._in_bits:
            value, level = 2.0**value, 2.0**level
        if self._in_bits:
            is_large = far >= _JUMP_OF_FOUR and distance >= 2
        else:
            is_large = of_share >= _JUMP_OF_SHARE and distance >= _LEAST_JUMP * self._first
        is_certain = far >= _JUMP or is_large
        return Jump(Departure("", self._label, value, level, max(far, of_share)), is_certain)

    def _least(self, *shares: float) -> float:
        return LEAST_BITS if self._in_bits else max(shares) or LEAST_BITS

    def curve(self) -> Curve:
        """Return the latest values, oldest first."""
        return Curve("", self._label, spelt(self._latest, self._in_bits))


def _far(before: Sequence[float], distance: float, least: float) -> float:
    """Return how many deviations a distance is above those before, where a deviation is not less than this."""
    middle, deviation, _ = (float(one[0]) for one in usual(np.array(before)[:, None]))
    return (distance - middle) / max(deviation, least)
