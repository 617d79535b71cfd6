"""Histories of magnitudes over the steps of a run, and the rule for a value that leaves its history.

The rule is the same for a loss, the gradients and every tensor. The distance of a value is how far it is above the
median of the 8 values before, so that a trend is no distance. A value leaves its history when its distance is so many
deviations above the median of the 64 distances before. The deviation is robust: 1.48 times the median distance from
that median, or the way from there to the 90 % quantile where that is longer, as it is in a skewed or heavy-tailed
history. docs/spikes.md states the rates of false alarms, and tests/unit/monitoring/test_spikes.py measures them.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf, isfinite, log2, nan
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import Optimizer

from ..instrumentation.attention import BOUND, LARGEST
from ..instrumentation.wrapped_names import find_module, named_modules
from ..numerics.readable import Numbers, is_plain, only_our_dispatch
from ..recording.events import PeakName
from ..report.spike import Curve, Departure

Places: TypeAlias = "np.ndarray[Any, np.dtype[np.intp]]"
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
LOGITS = (LARGEST, BOUND)
OF_CALL = re.compile(r"(output|input)(\[|\.|$)")  # labels of tensors of a call that are no weights or buffers
_DEPTH = WINDOW + LEVEL + 1
# Batcher's sorting network for 8 numbers: pairs of them that are put in order one after the other.
_LOW = (0, 1, 4, 5, 0, 1, 2, 3, 0, 2, 4, 6, 2, 3, 1, 3, 1, 3, 5)
_HIGH = (2, 3, 6, 7, 4, 5, 6, 7, 1, 3, 5, 7, 4, 5, 4, 6, 2, 4, 6)
_TOGETHER = 8  # steps whose logarithms are taken at once
# A learning rate jumps when it is so many times the median of the latest 16. It may be the cause for 32 steps.
_RATE_FACTOR, _RATE_STEPS, _RATE_LASTS = 3.0, 16, 32
# Squared gradient over Adam's second moment, as means over a weight: beyond 16 the step is several times too long. The
# gradients that left their history are looked at, and may be the cause for 16 steps.
_ADAM_RATIO, _ADAM_LASTS, _ADAM_LOOKS = 16.0, 16, 8
# Every so many steps: the limits of gradients anew, and norms and updates, the latter of so many elements of a weight.
_EVERY, _ELEMENTS = 32, 256
_WALKED = 8  # looks for weights until the modules are listed anew
_NORM, _UPDATE = "gradient norm", "update / weight"


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


def usual(values: Floats) -> tuple[Floats, Floats]:
    """Return the median of the numbers in each column and their deviation; nan for a column with too few."""
    middle, high = _quantiles(values, LEAST, 0.5, 0.9)
    (distance,) = _quantiles(np.abs(values - middle), LEAST, 0.5)
    return middle, np.maximum(_OF_DISTANCE * distance, _OF_QUANTILE * (high - middle))


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
            distance = value - level
            if distance > 0 and len(self._distances) >= LEAST:
                found = self._judge(value, level, distance)
            self._distances.append(distance)
        self._latest.append(value)
        return found

    def _judge(self, value: float, level: float, distance: float) -> Departure | None:
        least = LEAST_BITS if self._in_bits else LEAST_SHARE * max(abs(level), self._first) or LEAST_BITS
        ordered = sorted(self._distances)
        middle, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.5, 0.9))
        # In nearly all steps: the deviation is at least this, and numpy takes 60 µs for it.
        if distance - middle < JUMP * max(_OF_QUANTILE * (high - middle), least):
            return None
        _, deviation = (float(one[0]) for one in usual(np.array(self._distances)[:, None]))
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
    """Magnitudes of tensors over the latest steps, in bits. 350 bytes a tensor.

    A magnitude of 0 counts as missing: a tensor that was not there and one that was all zero look alike.
    """

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        self.first: Floats = np.zeros(0)
        self._bits: Floats = np.zeros((_DEPTH, 0), np.float32)
        self._count = 0
        self._waiting: list[Floats] = []  # magnitudes of the latest steps, which are cheaper to take together

    def meet(self, names: Sequence[PeakName]) -> None:
        """Add tensors, in the order of the forward or of the backward."""
        if not names:  # as in nearly all steps
            return
        self._settle()
        self.names += [(module, label) for module, label, _ in names]
        self._bits = np.pad(self._bits, ((0, 0), (0, len(names))), constant_values=nan)
        self.first = np.append(self.first, np.full(len(names), nan))

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
        self._bits[(self._count + np.arange(len(bits))) % _DEPTH] = bits
        self._count += len(bits)

    def latest(self) -> Floats:
        """Return the bits of the latest step; nan where a tensor was missing."""
        self._settle()
        row: Floats = self._bits[(self._count - 1) % _DEPTH]
        return row

    def limits(self, places: Places) -> tuple[Floats, Floats]:
        """Return the magnitudes that are usual for the tensors at these places, and those beyond their histories.

        They are 0 for one that was always missing.
        """
        before = self._in_order()[:, places]
        if self._count <= LEAST:
            return np.full(len(places), nan), np.full(len(places), inf)
        level, middle, deviation = self._usual(before)
        limits = np.nan_to_num(level + middle + CHANGED * deviation, nan=inf).astype(np.float64)
        missing = np.isnan(before).all(axis=0)
        return np.where(missing, 0.0, np.exp2(level)), np.where(missing, 0.0, np.exp2(limits))

    def departures(self, ago: int = 0) -> list[Departure]:
        """Return the tensors that left their history in the latest step, or so many before it, in their order."""
        self._settle()
        *before, latest = self._in_order()[: -ago or None] if self._count - ago > LEAST else [self.latest()]
        if not before:
            return []
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
        self._settle()
        return np.roll(self._bits, -(self._count % _DEPTH), axis=0)[-min(self._count, _DEPTH) :]

    @staticmethod
    def _usual(before: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the level of each tensor after these steps, and the median and the deviation of the distances."""
        parts = np.moveaxis(sliding_window_view(before, LEVEL, axis=0), -1, 0)
        levels = _quantiles(parts.reshape(LEVEL, -1), LEAST_LEVEL, 0.5)[0].reshape(parts.shape[1:])
        middle, deviation = usual(before[LEVEL:] - levels[:-1])
        return levels[-1], middle, np.maximum(deviation, LEAST_BITS)

    def meet_only(self, names: Sequence[tuple[str, str]]) -> None:
        """Begin anew with these tensors, unless they are known."""
        if list(names) != self.names:
            self.names, self._count, self.first, self._waiting = [], 0, np.zeros(0), []
            self._bits = np.zeros((_DEPTH, 0), np.float32)
            self.meet([(module, label, "") for module, label in names])

    def curve(self, name: tuple[str, str]) -> Curve:
        """Return the latest values of a tensor, oldest first."""
        return Curve(*name, _spelt(self._in_order()[:, self.names.index(name)].tolist(), True))


def _spelt(values: Iterable[float], in_bits: bool) -> tuple[float | None, ...]:
    return tuple(None if not isfinite(x) else 2.0**x if in_bits else x for x in values)


class TooLarge(NamedTuple):
    """Gradient that left its history, and its square over Adam's second moment."""

    step: int
    gradient: Departure
    ratio: Numbers


class StepHistory:
    """Learning rates of a model's steps, gradients beside Adam's second moment, and updates of the weights.

    Nothing here waits for a GPU, and no tensor of the model is kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sampled = {_NORM: Histories(), _UPDATE: Histories()}
        self._model = weakref.ref(model)
        self._rates: weakref.WeakKeyDictionary[Optimizer, deque[list[float]]] = weakref.WeakKeyDictionary()
        self._rate_jump: tuple[int, tuple[float, float]] | None = None
        self._levels: Floats = np.zeros(0)
        self._limits: Floats = np.zeros(0)
        self._too_large: deque[TooLarge] = deque(maxlen=_ADAM_LOOKS * _ADAM_LASTS)
        self._before_update: tuple[list[weakref.ref[Tensor]], Tensor] | None = None
        self._coming: list[tuple[str, Numbers]] = []
        self._named: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._walks = 0

    def add(
        self, step: int, optimizer: Optimizer, gradients: Histories, weights: Places, values: Floats
    ) -> None:
        """Take a step that is about to be made. `values` are the gradients at the places `weights`."""
        self._add_rates(step, optimizer)
        if step % _EVERY == 0:
            self._levels, self._limits = gradients.limits(weights)
        known = len(self._limits)
        for i in np.flatnonzero(values[:known] > self._limits)[:_ADAM_LOOKS].tolist():
            module, label = gradients.names[weights[i]]
            ratio = self._adam_ratio(optimizer, module, label)
            if ratio is not None:
                far = CHANGED if self._limits[i] else inf
                gradient = Departure(module, label, float(values[i]), float(self._levels[i]), far)
                self._too_large.append(TooLarge(step, gradient, Numbers(ratio)))
        if step % _EVERY == 0 or self._coming or self._before_update is not None:
            with torch.no_grad():
                self._sample(step)

    def rates(self, step: int) -> tuple[float, float] | None:
        """Return the learning rate before and after it jumped, if that was at one of the steps before this one."""
        found = self._rate_jump
        return found[1] if found is not None and 0 < step - found[0] <= _RATE_LASTS else None

    def too_large(self, step: int) -> list[tuple[TooLarge, float]]:
        """Return the latest gradients that were too large beside Adam's second moment, and how many times."""
        found = [(one, one.ratio.read()) for one in self._too_large if step - one.step <= _ADAM_LASTS]
        return [(one, ratio[0]) for one, ratio in found if ratio and ratio[0] >= _ADAM_RATIO]

    def forget(self) -> None:
        """Let go of what was kept of weights."""
        self._before_update = None

    def _add_rates(self, step: int, optimizer: Optimizer) -> None:
        rates = [float(one["lr"]) for one in optimizer.param_groups if _is_here(one.get("lr"))]
        known = self._rates.setdefault(optimizer, deque(maxlen=_RATE_STEPS))
        is_free = self._rate_jump is None or step > self._rate_jump[0] + _RATE_LASTS
        may_jump = len(known) == _RATE_STEPS and is_free and known.count(rates) < _RATE_STEPS
        for i, rate in enumerate(rates if may_jump else ()):
            before = median([one[i] for one in known if len(one) > i] or [0.0])
            if 0 < before <= rate / _RATE_FACTOR:
                self._rate_jump = step, (before, rate)
        known.append(rates)

    def _adam_ratio(self, optimizer: Optimizer, module: str, label: str) -> Tensor | None:
        """Return the mean square of a weight's gradient over that of Adam's second moment, without its bias."""
        model = self._model()
        owner = None if model is None else find_module(model, module)
        x = None if owner is None else owner.module._parameters.get(label.removesuffix(".grad"))
        state = {} if x is None else optimizer.state.get(x, {})
        second, gradient = state.get("exp_avg_sq"), None if x is None else x.grad
        if second is None or gradient is None or not (is_plain(second) and is_plain(gradient)):
            return None
        group = next(one for one in optimizer.param_groups if any(x is own for own in one["params"]))
        steps, betas = state.get("step"), group.get("betas")
        if betas is None or not _is_here(betas[1]):  # transformers' Adafactor has none
            return None
        unbiased = 1 - float(betas[1]) ** float(steps) if steps is not None and _is_here(steps) else 1.0
        with only_our_dispatch():
            square: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square()
            ratio: Tensor = square / (second.detach().sum(dtype=torch.float32) / max(unbiased, 1e-30))
        return ratio

    def _sample(self, step: int) -> None:
        """Take norms of gradients, and how far the sampled elements of the weights move in this step."""
        coming = []
        for kind, numbers in self._coming:
            values, histories = numbers.read(), self.sampled[kind]
            if not values:
                coming.append((kind, numbers))
            elif len(values) == len(histories.names):
                histories.add(np.array(values))
        self._coming = coming[-2:]
        if self._before_update is not None:
            kept, before = self._before_update
            self._before_update = None
            weights = [x for one in kept if (x := one()) is not None]
            if len(weights) == len(kept):
                moved, size = (x.norm(dim=1) for x in (_elements(weights) - before, before))
                self._coming.append((_UPDATE, Numbers(moved / size)))
        if step % _EVERY:
            return
        own = self._own_weights()
        for kind, histories in self.sampled.items():
            histories.meet_only([(name, f"{kind} of {label}") for name, label, _ in own])
        if own:
            weights = [x for _, _, x in own]
            norms = torch._foreach_norm([x.grad for x in weights if x.grad is not None])
            self._coming.append((_NORM, Numbers(torch.stack([*norms]).float())))
            self._before_update = [weakref.ref(x) for x in weights], _elements(weights)

    def _own_weights(self) -> list[tuple[str, str, Tensor]]:
        """Return the weights with gradients that one device holds, by module and label."""
        model = self._model()
        found: dict[int, tuple[str, str, Tensor]] = {}
        if model is not None and self._walks % _WALKED == 0:
            self._named = [
                (name, weakref.ref(one)) for name, _, one in named_modules(model) if one._parameters
            ]
        self._walks += 1
        for name, known in self._named:
            module = known()
            for label, x in () if module is None else module._parameters.items():
                if x is not None and x.grad is not None and x.numel() and is_plain(x) and is_plain(x.grad):
                    found.setdefault(id(x), (name, label, x))
        device = next((x.device for _, _, x in found.values()), None)
        return [one for one in found.values() if one[2].device == device and one[2].is_floating_point()]


def _is_here(x: Any) -> bool:
    """Return whether this is a number, and reading it waits for no device."""
    return x.device.type == "cpu" if isinstance(x, Tensor) else isinstance(x, float | int)


def _elements(weights: Sequence[Tensor]) -> Tensor:
    """Return some elements of each weight, evenly spaced, as a row of float32 that is padded with zeros."""
    sizes = [x.numel() for x in weights]
    rows = [
        x.contiguous().as_strided((min(size, _ELEMENTS),), (max(1, size // _ELEMENTS),))
        for x, size in zip(weights, sizes, strict=True)
    ]
    return pad_sequence([rows[0].float(), *rows[1:]], batch_first=True)  # of the type of the first
