"""The rule for a loss or a gradient norm that jumps.

A jump is judged like a departure of a tensor (peaks.py), upwards alone. Distances of a loss are also judged as shares
of its level, so that a loss that has fallen by a factor of ten has one history. By these alone more deviations are
needed, because small losses have heavy tails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isfinite, log2
from statistics import median

from ..report.spike import Curve, Departure
from .peaks import DEPTH, LEAST, LEAST_BITS, LEVEL, OF_DISTANCE, OF_QUANTILE, WINDOW

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
        self._latest: deque[float] = deque(maxlen=DEPTH)
        self._distances: deque[float] = deque(maxlen=WINDOW)
        self._shares: deque[float] = deque(maxlen=WINDOW)  # distances over the level
        self._first = 0.0  # level

    def add(self, value: float) -> Departure | None:
        """Take the value of a step. Return its departure if it has jumped."""
        value = log2(value) if self._in_bits and value > 0 else value
        if not isfinite(value):
            return None
        departure = None
        if len(self._latest) >= LEVEL:
            level = median(list(self._latest)[-LEVEL:])
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

    def curve(self) -> Curve:
        """Return the latest values, oldest first."""
        return Curve("", self._label, tuple(2.0**x if self._in_bits else x for x in self._latest))


def _deviations(before: Sequence[float], distance: float, least: float) -> float:
    """Return how many deviations a distance is above those before, where a deviation is at least this."""
    ordered, last = sorted(before), len(before) - 1
    middle, high = (ordered[round(part * last)] for part in (0.5, 0.9))
    spread = OF_DISTANCE * sorted(abs(x - middle) for x in ordered)[round(0.5 * last)]
    return (distance - middle) / max(spread, OF_QUANTILE * (high - middle), least)
