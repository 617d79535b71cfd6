"""Histories of magnitudes over the steps of a run, the rule for a value that leaves its history, and causes of spikes.

The rule is the same for a loss, the gradients and every tensor. The distance of a value is how far it is above the
median of the 8 values before, so that a trend is no distance. A value leaves its history when its distance is so many
deviations above the median of the 64 distances before. The deviation is robust: 1.48 times the median distance from
that median, or the way from there to the 90 % quantile where that is longer, as it is in a skewed or heavy-tailed
history. docs/spikes.md states the rates of false alarms, and tests/unit/monitoring/test_spikes.py measures them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log2, nan
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..instrumentation.attention import BOUND, LARGEST
from ..recording.events import PeakName
from ..report.spike import Cause, Curve, Departure

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"

# Distances that a value's own is compared with, and the fewest of them; values that a distance is measured from, and
# the fewest of them.
WINDOW, LEAST = 64, 32
LEVEL, LEAST_LEVEL = 8, 4
# Deviations at which a loss or the gradients jump, and at which a tensor counts once one of them has jumped.
JUMP, CHANGED = 10.0, 8.0
# The least deviation: of a magnitude in bits (1.4 %), of a loss as a share of its level and of its first level.
LEAST_BITS, LEAST_SHARE = 0.02, 0.01
# Deviations of normal values: their median distance, and the quantile of 90 %.
_OF_DISTANCE, _OF_QUANTILE = 1.4826, 1 / 1.2816
# Attention logits saturate a softmax at about 100, which is where QK-clip begins.
_MANY_LOGITS, _GROWN_LOGITS = 100.0, 8.0
LOGITS = (LARGEST, BOUND)
OF_CALL = re.compile(r"(output|input)(\[|\.|$)")  # labels of tensors of a call that are no weights or buffers
_DEPTH = WINDOW + LEVEL + 1


def usual(values: Floats, fewest: int = LEAST) -> tuple[Floats, Floats]:
    """Return the median of the numbers in each column and their deviation; nan for a column with too few."""
    ordered = np.sort(values, axis=0)  # nan comes last
    count = np.isfinite(values).sum(axis=0)
    has = count >= fewest
    last = np.where(has, count, 1) - 1

    def at(part: float, rows: Floats) -> Floats:
        place = np.round(part * last).astype(np.intp)
        found: Floats = np.take_along_axis(rows, place[None], axis=0)[0]
        return found

    middle = at(0.5, ordered)
    distance = at(0.5, np.sort(np.abs(values - middle), axis=0))
    deviation = np.maximum(_OF_DISTANCE * distance, _OF_QUANTILE * (at(0.9, ordered) - middle))
    return np.where(has, middle, nan), np.where(has, deviation, nan)


class Signal:
    """One number of each step that may jump: the loss, or the size of the gradients in bits."""

    def __init__(self, label: str, *, in_bits: bool) -> None:
        self._label = label
        self._in_bits = in_bits
        self._latest: deque[float] = deque(maxlen=_DEPTH)
        self._distances: deque[float] = deque(maxlen=WINDOW)
        self._first = 0.0  # level

    def add(self, value: float) -> Departure | None:
        """Take the value of a step. Return its departure if it has jumped."""
        value = log2(value) if self._in_bits and value > 0 else value
        if not isfinite(value):
            return None
        found = None
        if len(self._latest) >= LEVEL:
            level = median(list(self._latest)[-LEVEL:])
            self._first = self._first or abs(level)
            if len(self._distances) >= LEAST:
                found = self._judge(value, level, value - level)
            self._distances.append(value - level)
        self._latest.append(value)
        return found

    def _judge(self, value: float, level: float, distance: float) -> Departure | None:
        middle, deviation = (float(one[0]) for one in usual(np.array(self._distances)[:, None]))
        least = LEAST_BITS if self._in_bits else LEAST_SHARE * max(abs(level), self._first) or LEAST_BITS
        far = (distance - middle) / max(deviation, least)
        if far < JUMP:
            return None
        if self._in_bits:
            value, level = 2.0**value, 2.0**level
        return Departure("", self._label, value, level, far)

    def curve(self) -> Curve:
        """Return the latest values, oldest first."""
        return Curve("", self._label, _spelt(self._latest, self._in_bits))


class Histories:
    """Magnitudes of tensors over the latest steps, in bits. 260 bytes a tensor.

    A magnitude of 0 counts as missing: a tensor that was not there and one that was all zero look alike.
    """

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        self.first: Floats = np.zeros(0)
        self._bits: Floats = np.zeros((_DEPTH, 0), np.float32)
        self._count = 0

    def meet(self, names: Sequence[PeakName]) -> None:
        """Add tensors, in the order of the forward or of the backward."""
        self.names += [(module, label) for module, label, _ in names]
        self._bits = np.pad(self._bits, ((0, 0), (0, len(names))), constant_values=nan)
        self.first = np.append(self.first, np.full(len(names), nan))

    def add(self, values: Floats) -> None:
        """Take the magnitudes of a step."""
        row = self._bits[self._count % _DEPTH]
        with np.errstate(divide="ignore"):
            row[:] = np.log2(values)
        row[row == -inf] = nan
        self.first = np.where(np.isnan(self.first), row, self.first) if self._count < WINDOW else self.first
        self._count += 1

    def latest(self) -> Floats:
        """Return the bits of the latest step; nan where a tensor was missing."""
        row: Floats = self._bits[(self._count - 1) % _DEPTH]
        return row

    def limits(self) -> tuple[Floats, Floats]:
        """Return the bits that are usual for each tensor, and those from which on it leaves its history.

        They are -inf for one that was always missing.
        """
        if self._count <= LEAST:
            return np.full(len(self.names), nan), np.full(len(self.names), inf)
        level, middle, deviation = self._usual(self._in_order())
        limits = np.nan_to_num(level + middle + CHANGED * deviation, nan=inf)
        missing = np.isnan(self._bits).all(axis=0)
        return np.where(missing, -inf, level), np.where(missing, -inf, limits)

    def departures(self) -> list[Departure]:
        """Return the tensors that left their history in the latest step, in their order."""
        if self._count <= LEAST:
            return []
        *before, latest = self._in_order()
        level, middle, deviation = self._usual(np.array(before))
        far = (latest - level - middle) / deviation
        far[np.isfinite(latest) & np.isnan(before).all(axis=0)] = inf
        values, levels = 2.0**latest, np.nan_to_num(2.0**level)
        return [
            Departure(*self.names[i], float(values[i]), float(levels[i]), float(far[i]))
            for i in np.flatnonzero(far >= CHANGED)
        ]

    def _in_order(self) -> Floats:
        """Return the steps, oldest first."""
        return np.roll(self._bits, -(self._count % _DEPTH), axis=0)[-min(self._count, _DEPTH) :]

    @staticmethod
    def _usual(before: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the level of each tensor after these steps, and the median and the deviation of the distances."""
        parts = np.moveaxis(sliding_window_view(before, LEVEL, axis=0), -1, 0)
        levels, _ = usual(parts.reshape(LEVEL, -1), LEAST_LEVEL)
        levels = levels.reshape(parts.shape[1:])
        middle, deviation = usual(before[LEVEL:] - levels[:-1])
        return levels[-1], middle, np.maximum(deviation, LEAST_BITS)

    def meet_only(self, names: Sequence[tuple[str, str]]) -> None:
        """Begin anew with these tensors, unless they are known."""
        if list(names) != self.names:
            self.names, self._count, self.first = [], 0, np.zeros(0)
            self._bits = np.zeros((_DEPTH, 0), np.float32)
            self.meet([(module, label, "") for module, label in names])

    def curve(self, name: tuple[str, str]) -> Curve:
        """Return the latest values of a tensor, oldest first."""
        return Curve(*name, _spelt(self._in_order()[:, self.names.index(name)].tolist(), True))

    def grown_logits(self) -> Departure | None:
        """Return the attention logits of the module that has the largest, if they have grown to where softmax ends."""
        found: list[Departure] = []
        for (name, label), bits, first in zip(
            self.names, self.latest().tolist(), self.first.tolist(), strict=True
        ):
            if label in LOGITS and bits >= log2(_MANY_LOGITS) and bits - first >= log2(_GROWN_LOGITS):
                found.append(Departure(name, label, 2.0**bits, 2.0**first, nan))
        return max(found, key=lambda one: one.value, default=None)


def _spelt(values: Iterable[float], in_bits: bool) -> tuple[float | None, ...]:
    return tuple(None if not isfinite(x) else 2.0**x if in_bits else x for x in values)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known when a loss or a gradient norm has jumped: departures of the forward and of the backward.

    `steps_ago` is by how many steps the learning rate's jump came before, or the gradient for which Adam's second
    moment was too small; None without one. `optimizer` is the departure of that gradient.
    """

    forward: Sequence[Departure]
    backward: Sequence[Departure]
    first_gradients: Sequence[tuple[str, str]]  # that the backward begins with
    first_outputs: Sequence[tuple[str, str]]  # that the forward begins with
    logits: Departure | None = None
    loss_jumped: bool = False
    rate_jumped: bool = False
    optimizer: Departure | None = None


def cause_of(evidence: Evidence) -> tuple[Cause, Departure | None]:
    """Return the class of the cause, and the tensor that shows it."""
    forward, logits = evidence.forward, evidence.logits
    outputs = [one for one in forward if OF_CALL.match(one.label) or one.label in LOGITS]
    first = outputs[0] if outputs else None
    if evidence.rate_jumped:
        return "learning rate", first
    if evidence.optimizer is not None:
        return "optimizer", evidence.optimizer
    found = next((one for one in outputs if one.label in LOGITS), logits)
    if found is not None and (first is None or f"{first.module}.".startswith(f"{found.module}.")):
        return "attention", found
    weights = [one for one in forward if one not in outputs]
    if weights and (first is None or forward.index(weights[0]) < forward.index(first)):
        return "weight", weights[0]
    if first is not None:
        return "input" if (first.module, first.label) in evidence.first_outputs else "module", first
    if evidence.backward and not evidence.loss_jumped:  # no gradient changes the loss of its own step
        start = evidence.backward[0]
        is_loss = (start.module, start.label) in evidence.first_gradients
        return "loss" if is_loss else "gradient", start
    return "loss", None
