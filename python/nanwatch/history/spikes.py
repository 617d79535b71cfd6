"""Spikes of a Watch: what is gathered between two steps of an optimizer, and the report when a loss or gradient jumps.

All numbers come from what the recorder reads anyway, once for each step, before it changes a weight. Nothing waits for
a GPU: a number that has not arrived counts as missing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite, log2, sqrt
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..instrumentation.attention import LARGEST
from ..numerics.readable import Numbers, is_plain
from ..recording.events import Event, PeakName, Recorder
from ..report.events import Cause, Departure, SpikeReport
from ..util.job import rank
from ..util.messages import is_due, spell, suppressed, warn_user
from .forecast import LEAST, LEAST_BITS, LEVEL, OF_CALL, OF_DISTANCE, OF_QUANTILE, WINDOW, Floats, PeakHistory

# Jumps within so many steps belong to one spike.
_EPISODE = 16
_MOST_REPORTS = 16
# Losses of so many samples are kept by sample.
_MOST_SAMPLES = 4096
_SHOWN_SAMPLES = 3
# A learning rate jumps when it is so many times the median of the latest 16. It may be the cause for 32 steps.
_RATE_FACTOR, _RATE_STEPS, _RATE_LASTS = 3.0, 16, 32
# The first optimizers, such as both of a GAN, have histories of their own. Further ones share the last.
_MOST_OPTIMIZERS = 4
# The output of a model of transformers, which is no cause of its own jump.
_LOSS = "", "output[loss]"


def _harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an exception of the method end the search for spikes, by one warning, and not the user's run."""

    @functools.wraps(method)
    def safe(self: SpikeWatch, *args: Any) -> Any:
        try:  # not after `remove`, or once something went wrong
            return method(self, *args) if self._backward_starts.active else None
        except Exception as error:
            suppressed("spikes could not be looked for")
            self.remove()
            warn_user(f"nanwatch looks for spikes no more, which raised {spell(error)}", may_raise=False)
            return None

    return safe


class _Track:
    """Histories of the steps of one optimizer, whose losses and gradients may be another's altogether."""

    def __init__(self) -> None:
        self.step = 0
        self.forward, self.backward = PeakHistory(), PeakHistory()
        self.loss, self.norm = Signal("loss", in_bits=False), Signal("gradients", in_bits=True)
        self.of_weights: list[int] = []  # places among the gradients
        self._rates: deque[float] = deque(maxlen=_RATE_STEPS)
        self._rate_jump: tuple[int, tuple[float, float]] | None = None

    def add_names(self, forward: Sequence[PeakName], backward: Sequence[PeakName]) -> None:
        self.forward.add_names(forward[len(self.forward.names) :])
        start = len(self.backward.names)
        self.backward.add_names(backward[start:])
        self.of_weights += [i for i in range(start, len(backward)) if OF_CALL.match(backward[i][1]) is None]

    def add_rate(self, optimizer: Optimizer) -> None:
        """Take the largest learning rate of a step that is about to be made."""
        rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
        # To read a tensor of another device would wait for that device.
        plain = [x for x in rates if isinstance(x, float | int) or getattr(x, "is_cpu", False)]
        rate = max(map(float, plain), default=0.0)
        usual = median(self._rates) if len(self._rates) == _RATE_STEPS else 0.0
        if 0 < usual <= rate / _RATE_FACTOR and self.rates() is None:
            self._rate_jump = self.step, (usual, rate)
        self._rates.append(rate)

    def rates(self) -> tuple[float, float] | None:
        """Return the learning rate before and after it jumped, if that was at one of the latest steps before."""
        if self._rate_jump is None or not 0 < self.step - self._rate_jump[0] <= _RATE_LASTS:
            return None
        return self._rate_jump[1]


class SpikeWatch:
    """Part of a Watch with `spikes`: histories of its tensors, and reports of spikes.

    `loss_scale` has a `find_scale()` that waits for no device, and `num_skipped` steps of a GradScaler. `write` writes
    a report and returns it with its files. For it, `keep` gets the number of each batch whose backward begins. An
    exception in here ends the search for spikes, by one warning, and not the run.
    """

    def __init__(
        self,
        recorder: Recorder,
        loss_scale: Any,
        keep: Callable[[int], object],
        write: Callable[[SpikeReport], SpikeReport] | None,
        tell: Callable[[SpikeReport], object],
    ) -> None:
        self.reports: deque[SpikeReport] = deque(maxlen=_MOST_REPORTS)
        self._recorder, self._loss_scale = recorder, loss_scale
        self._keep, self._write, self._tell = keep, write, tell
        self._turn = threading.Lock()
        self._tracks: weakref.WeakKeyDictionary[Optimizer, _Track] = weakref.WeakKeyDictionary()
        self._names: list[PeakName] = []  # of the forward, to which batches of other threads add at any time
        self._gradient_names: list[PeakName] = []
        self._forwards: deque[tuple[int, Floats]] = deque(maxlen=_EPISODE)
        self._losses: deque[Numbers] = deque(maxlen=_EPISODE)  # of backwards
        self._noted: deque[Numbers] = deque(maxlen=_EPISODE)
        self._scale: Numbers | None = None
        self._latest_scale = 1.0
        self._num_skipped = self._step = self._quiet_until = self._num_spikes = 0
        recorder.gathers_inputs = recorder.gathers_gradient_peaks = True
        self._backward_starts = recorder.subscribe(Event.BACKWARD_START)

    def remove(self) -> None:
        """Gather no more, and keep the reports."""
        self._recorder.gathers_inputs = self._recorder.gathers_gradient_peaks = False
        self._backward_starts.remove()

    @_harmless
    def note_loss(self, loss: Tensor | float) -> None:
        """Take a loss, or the losses of the samples of a batch, in place of that of the backward."""
        x = loss if isinstance(loss, Tensor) else torch.tensor(float(loss))
        if is_plain(x) and x.device.type in ("cpu", "cuda") and x.numel():
            self._noted.append(Numbers(x if x.numel() <= _MOST_SAMPLES else x.detach().mean()))

    @_harmless
    def take(self, batch: int, names: Sequence[PeakName], values: bytes) -> None:
        """Take the peaks of a batch as Recorder.take_peaks gives them, at the batch's end."""
        self._names += names
        if batch >= 0 and torch.is_grad_enabled():  # else an evaluation
            self._forwards.append((batch, np.frombuffer(values)))

    @_harmless
    def backward_started(self, loss: Numbers | None) -> None:
        """Note the loss of a backward, where it is one number, and its scale. Keep the batch for a capsule."""
        self._losses += [] if loss is None else [loss]
        scale = self._loss_scale.find_scale()
        self._scale = None if scale is None else Numbers(scale)
        if self._write is not None:
            self._keep(self._recorder.latest_batch)

    def before_step(self, optimizer: Optimizer) -> None:
        """Judge what came since the last step. Tell of a spike."""
        if not self._turn.acquire(blocking=False):  # another thread's step: waiting could lock up
            return
        try:
            report = self._judge(optimizer)
        finally:
            self._turn.release()
        if report is not None:
            self.reports.append(report)
            self._tell(report)

    @_harmless
    def _judge(self, optimizer: Optimizer) -> SpikeReport | None:
        batch, names, values = self._recorder.take_gradient_peaks()
        self._gradient_names += names
        losses, self._losses = self._losses, deque(maxlen=_EPISODE)
        noted, self._noted = self._noted, deque(maxlen=_EPISODE)
        forwards, self._forwards = self._forwards, deque(maxlen=_EPISODE)
        if batch < 0:
            return None
        if self._loss_scale.num_skipped != self._num_skipped:  # gradients of a skipped step are among these
            self._num_skipped = self._loss_scale.num_skipped
            return None
        self._step += 1
        track = self._track(optimizer)
        track.step += 1
        track.add_names(self._names, self._gradient_names)
        track.add_rate(optimizer)
        scales = [] if self._scale is None else self._scale.read()
        scale = self._latest_scale = next(iter(scales), 0.0) or self._latest_scale
        gradients = np.frombuffer(values) / scale
        forward = np.zeros(len(track.forward.names))
        for number, magnitudes in forwards:
            if number <= batch:
                part = forward[: len(magnitudes)]
                np.maximum(part, magnitudes[: len(forward)], out=part)
        track.forward.add(track.step, forward)
        track.backward.add(track.step, gradients)
        by_sample = [samples for numbers in noted if (samples := numbers.read())]
        means = [sum(samples) / len(samples) for samples in by_sample]
        means = means or [x / scale for numbers in losses for x in numbers.read()]
        of_weights = gradients[track.of_weights]
        loss = track.loss.add(sum(means) / len(means)) if means else None
        norm = track.norm.add(sqrt(of_weights.dot(of_weights)))
        jumps = [jump for jump in (loss, norm) if jump is not None]
        is_new = self._step > self._quiet_until
        if jumps:
            self._quiet_until = self._step + _EPISODE
            self._num_spikes += is_new
        if not jumps or not is_new or not is_due(self._num_spikes):
            return None
        report = self._report(track, jumps, batch, [x for samples in by_sample for x in samples])
        return report if self._write is None else self._write(report)

    def _track(self, optimizer: Optimizer) -> _Track:
        track = self._tracks.get(optimizer)
        if track is None:
            tracks = list(self._tracks.values())
            track = _Track() if len(tracks) < _MOST_OPTIMIZERS else tracks[-1]
            self._tracks[optimizer] = track
        return track

    def _report(
        self, track: _Track, jumps: Sequence[Departure], batch: int, losses: list[float]
    ) -> SpikeReport:
        forward = [x for x in track.forward.departures(falls=True) if (x.module, x.label) != _LOSS]
        backward = track.backward.departures()
        # The step of another optimizer, as of a GAN's other part, has been made. This one is about to be made.
        rates = next((rates for other_track in self._tracks.values() if (rates := other_track.rates())), None)
        cause, first = cause_of(jumps, forward, backward, rates)
        departures = tuple(forward), tuple(backward)
        return SpikeReport(batch, rank(), tuple(jumps), cause, first, *departures, rates, _shares(losses))


def cause_of(
    jumps: Sequence[Departure],
    forward: Sequence[Departure],
    backward: Sequence[Departure],
    rates: tuple[float, float] | None,
) -> tuple[Cause, Departure | None]:
    """Return the class of the first signal that left its history, and the tensor that shows it.

    The learning rate comes before the tensors of the forward, in their order, and these before the gradients. No
    gradient changes the loss of its own step.
    """
    if rates is not None:
        return "learning rate", next(iter(forward), None)
    if forward:
        label = forward[0].label
        if label.startswith("input"):
            return "input", forward[0]
        is_own = OF_CALL.match(label) is None and label != LARGEST
        return "weight" if is_own else "module", forward[0]
    if backward and all(jump.label != "loss" for jump in jumps):
        return "gradient", backward[0]
    return "loss", None


def _shares(losses: list[float]) -> tuple[tuple[int, float], ...]:
    """Return the samples with the largest shares of the sum of the losses, and these shares."""
    total = sum(losses)
    if len(losses) < 2 or min(losses) < 0 or not total > 0:
        return ()
    order = sorted(range(len(losses)), key=lambda i: -losses[i])[:_SHOWN_SAMPLES]
    return tuple((i, losses[i] / total) for i in order)


# The rule for a loss or a gradient norm that jumps is that of a tensor, upwards alone. Distances of a loss are also
# judged as shares of its level, so that a loss that has fallen by a factor of ten has one history. By these alone more
# deviations are needed, because small losses have heavy tails.

# Deviations at which a loss or the gradients jump; those of gradients that are at least 4 times their level; those of a
# loss by shares of its level alone.
_JUMP, _JUMP_OF_FOUR, _JUMP_OF_SHARE = 12.0, 10.0, 30.0
# A level below this share of the first one counts as that: there a loss differs by factors.
_FLOOR = 0.02
# The least deviation of a loss, as a share of its level or of its first level, and that of distances over the level, as
# a share of the first level. By these distances alone a jump has at least 5 % of the first level.
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
