"""Spikes of a Watch: what is gathered between two steps of an optimizer, and the report when a loss or gradient jumps.

All is read from what the recorder has read anyway, once for each step, before it changes a weight. Nothing waits for a
GPU: a number that has not come yet counts as missing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import nan, sqrt
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ...numerics.readable import Numbers, is_plain
from ...recording.events import Event, PeakName, Recorder
from ...report.spike import Cause, Curve, Departure, SpikeReport
from ...util.job import rank
from ...util.visible import spell, suppressed, warn_user
from ..peaks import LEAST, OF_CALL, Floats, PeakHistory, Places
from ..suspicion import Suspicion
from .causes import LOGITS, Evidence, cause_of
from .signals import Signal
from .steps import StepHistory

_T = TypeVar("_T")

# Jumps within so many steps belong to one spike.
_EPISODE = 16
_MOST_REPORTS = 16
# Losses of so many samples are kept by sample.
_MOST_SAMPLES = 4096
_SHOWN_SAMPLES = 3
_SHOWN_CURVES = 6
# Attention logits saturate a softmax at about 100, which is where QK-clip begins.
_MANY_LOGITS, _GROWN_LOGITS = 100.0, 8.0
# Optimizers with histories of their own, as those of a GAN. Further ones share the last.
_MOST_OPTIMIZERS = 4
# Causes that make a smaller jump one of notice: they are seen by themselves.
_SEEN = ("input", "learning rate", "optimizer", "weight", "attention", "gradient")


def _harmless(method: Callable[..., _T]) -> Callable[..., _T | None]:
    """Let an exception of the method end the search for spikes, by one warning, and not the user's run."""

    @functools.wraps(method)
    def safe(self: SpikeWatch, *args: Any) -> _T | None:
        if not self._backward_starts.active:  # removed, or something went wrong
            return None
        try:
            return method(self, *args)
        except Exception as error:
            suppressed("spikes could not be looked for")
            self.remove()
            warn_user(f"nanwatch looks for spikes no more, which raised {spell(error)}", may_raise=False)
            return None

    return safe


class _Track:
    """Histories of the steps of one optimizer, whose losses and gradients may be another's altogether."""

    def __init__(self, model: nn.Module) -> None:
        self.step = 0
        self.forward, self.backward = PeakHistory(falls=True), PeakHistory()
        self.loss, self.norm = Signal("loss", in_bits=False), Signal("gradients", in_bits=True)
        self.steps = StepHistory(model)
        self.weights: Places = np.zeros(0, np.intp)  # of the gradients, those of weights

    def meet(self, forward: Sequence[PeakName], backward: Sequence[PeakName]) -> None:
        """Add the tensors that are new here."""
        self.forward.meet(forward[len(self.forward.names) :])
        if len(backward) > len(self.backward.names):
            self.backward.meet(backward[len(self.backward.names) :])
            own = [i for i, (_, label) in enumerate(self.backward.names) if OF_CALL.match(label) is None]
            self.weights = np.array(own, np.intp)


class LossScale(Protocol):
    """Scale of the losses, and the steps that a GradScaler has skipped."""

    num_skipped: int

    @property
    def has_scaler(self) -> bool:
        """True if the GradScaler is known."""

    def note_scale(self) -> Tensor | None:
        """Return a copy of the present scale on its own device, without waiting for it."""


class SpikeWatch:
    """Part of a Watch with `spikes`: histories of its tensors, and reports of spikes.

    `is_due` chooses the spikes that are reported, by their number from 1. `write` writes a report and returns it with
    its files; for it, `keep` gets the number of each batch whose backward begins. An exception in here ends the search
    for spikes, by one warning, and not the run.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        loss_scale: LossScale,
        suspicion: Suspicion,
        is_due: Callable[[int], bool],
        keep: Callable[[int], object],
        write: Callable[[SpikeReport], SpikeReport] | None,
        tell: Callable[[SpikeReport], object],
    ) -> None:
        self._tell = tell
        self.reports: deque[SpikeReport] = deque(maxlen=_MOST_REPORTS)
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._loss_scale = loss_scale
        self._suspicion = suspicion
        self._is_due = is_due
        self._keep = keep
        self._write = write
        self._turn = threading.Lock()
        self._tracks: weakref.WeakKeyDictionary[Optimizer, _Track] = weakref.WeakKeyDictionary()
        self._names: list[PeakName] = []  # of the forward, to which batches of other threads add at any time
        self._gradient_names: list[PeakName] = []
        self._forwards: deque[tuple[int, Floats]] = deque(maxlen=_EPISODE)
        self._losses: deque[Numbers] = deque(maxlen=_EPISODE)
        self._loss_at: int | None = None  # among the tensors of the forward: an output called loss
        self._looked_for_loss = 0  # among so many of them
        self._scale: Numbers | None = None
        self._first_scale: float | None = None
        self._num_skipped = 0
        self._step = 0
        self._quiet_until = 0
        self._num_spikes = 0
        recorder.gathers_inputs = recorder.gathers_gradient_peaks = True
        self._backward_starts = recorder.subscribe(Event.BACKWARD_START)

    def remove(self) -> None:
        """Gather no more, and keep the reports."""
        self._recorder.gathers_inputs = self._recorder.gathers_gradient_peaks = False
        self._backward_starts.remove()

    @_harmless
    def note_loss(self, loss: Tensor | float) -> None:
        """Take a loss, or the losses of the samples of a batch."""
        x = loss if isinstance(loss, Tensor) else torch.tensor(float(loss))
        if is_plain(x) and x.device.type in ("cpu", "cuda") and x.numel():
            self._losses.append(Numbers(x if x.numel() <= _MOST_SAMPLES else x.detach().mean()))

    @_harmless
    def take(self, batch: int, names: Sequence[PeakName], values: bytes) -> None:
        """Take the peaks of a batch as Recorder.take_peaks gives them, at the batch's end."""
        self._names.extend(names)
        if batch >= 0 and torch.is_grad_enabled():  # else an evaluation
            self._forwards.append((batch, np.frombuffer(values)))

    @_harmless
    def backward_started(self) -> None:
        """Note the loss scale of a backward, and keep the batch for a capsule."""
        # The search for it takes 10 ms for a million objects.
        if self._loss_scale.has_scaler or self._step in (LEAST, 16 * LEAST, 256 * LEAST):
            scale = self._loss_scale.note_scale()
            self._scale = None if scale is None else Numbers(scale)
        if self._write is not None:
            self._keep(self._recorder.latest_batch)

    def before_step(self, optimizer: Optimizer) -> None:
        """Judge what came since the last step. Tell of a spike."""
        if not self._turn.acquire(blocking=False):  # another thread's step: waiting could lock up
            return
        try:
            found = self._judge(optimizer)
        finally:
            self._turn.release()
        if found is not None:
            self.reports.append(found)
            self._tell(found)

    @_harmless
    def _judge(self, optimizer: Optimizer) -> SpikeReport | None:
        batch, names, found = self._recorder.take_gradient_peaks()
        self._gradient_names += names
        losses, self._losses = self._losses, deque(maxlen=_EPISODE)
        forwards, self._forwards = self._forwards, deque(maxlen=_EPISODE)
        if batch < 0:
            return None
        if self._loss_scale.num_skipped != self._num_skipped:  # gradients of a skipped step are among these
            self._num_skipped = self._loss_scale.num_skipped
            return None
        self._step += 1
        track = self._track(optimizer)
        track.step += 1
        track.meet(self._names, self._gradient_names)
        scale, gradients = self._relative_scale(), np.frombuffer(found)
        if scale != 1:
            gradients = gradients / scale
        size = len(track.forward.names)
        taken = [values for number, values in forwards if number <= batch]
        if len(taken) == 1 and len(taken[0]) == size:
            (forward,) = taken
        else:
            forward = np.zeros(size)
            for values in taken:
                forward[: len(values)] = np.maximum(forward[: len(values)], values[:size])
        track.forward.add(track.step, forward)
        track.backward.add(track.step, gradients)
        by_sample = [one.read() for one in losses]
        means = [sum(one) / len(one) for one in by_sample if one]
        loss_at = self._find_loss()
        if not means and loss_at is not None and forward[loss_at]:
            means = [float(forward[loss_at])]
        loss = track.loss.add(sum(means) / len(means)) if means else None
        of_weights = gradients[track.weights]
        norm = track.norm.add(sqrt(of_weights.dot(of_weights)))
        track.steps.add(track.step, optimizer, track.backward, track.weights, of_weights)
        jumps = [one for one in (loss, norm) if one is not None]
        if not jumps:
            return None
        certain = any(one.certain for one in jumps)
        is_new = self._step > self._quiet_until
        if certain:
            self._quiet_until = self._step + _EPISODE
        if not is_new:
            return None
        evidence = self._evidence(track, [one.departure for one in jumps], certain)
        cause, first = cause_of(evidence)
        if not certain and (cause not in _SEEN or first is None):
            return None
        self._quiet_until = self._step + _EPISODE
        self._num_spikes += 1
        if not self._is_due(self._num_spikes):
            return None
        report = self._report(track, evidence, cause, first, batch, [x for one in by_sample for x in one])
        return report if self._write is None else self._write(report)

    def _track(self, optimizer: Optimizer) -> _Track:
        track = self._tracks.get(optimizer)
        if track is None:
            others = list(self._tracks.values())
            model = self._model()
            assert model is not None
            track = _Track(model) if len(others) < _MOST_OPTIMIZERS else others[-1]
            self._tracks[optimizer] = track
        return track

    def _find_loss(self) -> int | None:
        """Return the place of an output called loss among the tensors of the forward."""
        names = self._names
        if self._loss_at is None:
            for place in range(self._looked_for_loss, len(names)):
                if names[place][:2] == ("", "output[loss]"):
                    self._loss_at = place
            self._looked_for_loss = len(names)
        return self._loss_at

    def _relative_scale(self) -> float:
        """Return the loss scale over the first one that was known."""
        scale = next(iter(() if self._scale is None else self._scale.read()), None) or self._first_scale
        if scale is None:
            return 1.0
        self._first_scale = self._first_scale or scale
        return scale / self._first_scale

    def _evidence(self, track: _Track, jumps: list[Departure], certain: bool) -> Evidence:
        forward, backward = self._left_forward(track), track.backward.departures()
        large = track.steps.too_large(track.step)
        early = next((one for one, _ in large if one.step < track.step), None)
        # The forward of that step came before its gradient.
        if early is not None and self._left_forward(track, track.step - early.step):
            early = None
        # The step of another optimizer, as of a GAN's other part, has been made. This one is about to be made.
        ends = [(own, one, one.step + (one is not track)) for own, one in self._tracks.items()]
        spoilt = next((found for _, one, end in ends if (found := one.steps.spoilt(end))), None)
        damaged = None if early is None else early.gradient
        if damaged is None and (forward or certain):  # reads the states of all weights
            states = (one.steps.unexplained(end, own, one.backward) for own, one, end in ends)
            damaged = next((state for state in states if state is not None), None)
        outer = outermost(module for module, _ in track.forward.names)
        worst = max(large, key=lambda one: one[1], default=None)
        return Evidence(
            jumps,
            forward,
            backward,
            dict(track.forward.changed()),
            [one for one in forward if one.label.startswith("input[") and one.module in outer],
            frozenset(module for module, label in track.forward.names if label.startswith("input[")),
            [*track.backward.names[:1], *(one for one in track.backward.names if not one[0])],
            [one for one in track.forward.names if one[1].startswith("output")][:1],
            _grown_logits(track.forward),
            next((rates for _, one, end in ends if (rates := one.steps.rates(end))), None),
            damaged,
            spoilt,
            None if worst is None else (worst[0].gradient.module, worst[0].gradient.label, worst[1]),
        )

    def _report(
        self,
        track: _Track,
        found: Evidence,
        cause: Cause,
        first: Departure | None,
        batch: int,
        losses: list[float],
    ) -> SpikeReport:
        ago = None if first is None else found.changed.get(first)
        return SpikeReport(
            batch,
            rank(),
            tuple(found.jumps),
            cause,
            first,
            tuple(found.forward),
            tuple(found.backward),
            found.rates,
            found.adam,
            tuple((module, value) for (module, label), value in track.forward.latest() if label in LOGITS),
            _shares(losses),
            self._suspicion.suspects(),
            tuple(self._curves(track, first, list(found.forward), list(found.backward))),
            remarks=()
            if first is None or not ago
            else (f"{first.place} changed {ago} steps before this one.",),
        )

    def _left_forward(self, track: _Track, ago: int = 0) -> list[Departure]:
        """Return the tensors of the forward that left their history so many steps ago, but for the loss."""
        loss = None if self._loss_at is None else self._names[self._loss_at][:2]
        return [one for one in track.forward.departures(ago) if (one.module, one.label) != loss]

    def _curves(
        self, track: _Track, first: Departure | None, forward: list[Departure], backward: list[Departure]
    ) -> Iterator[Curve]:
        yield from (one.curve() for one in (track.loss, track.norm))
        for histories, found in ((track.forward, forward), (track.backward, backward)):
            names = [(one.module, one.label) for one in ([] if first is None else [first]) + found]
            known = set(histories.names)
            for name in [one for one in dict.fromkeys(names) if one in known][:_SHOWN_CURVES]:
                yield histories.curve(name)


def outermost(modules: Iterable[str]) -> frozenset[str]:
    """Return the modules that are inside no other of these."""
    known = set(modules)
    if "" in known:
        return frozenset({""})
    parts = [(name, name.split(".")) for name in known]
    return frozenset(
        name for name, own in parts if not any(".".join(own[:i]) in known for i in range(1, len(own)))
    )


def _grown_logits(forward: PeakHistory) -> Departure | None:
    """Return the attention logits of the module that has the largest, if they have grown to where softmax ends."""
    first = {name: begin for name, begin, _ in forward.ends()}
    found = [
        Departure(*name, value, first[name], nan)
        for name, value in forward.latest()
        if name[1] in LOGITS and value >= max(_MANY_LOGITS, _GROWN_LOGITS * first[name])
    ]
    return max(found, key=lambda one: one.value, default=None)


def _shares(losses: list[float]) -> tuple[tuple[int, float], ...]:
    """Return the samples with the largest shares of the sum of the losses, and these shares."""
    total = sum(losses)
    if len(losses) < 2 or min(losses) < 0 or not total > 0:
        return ()
    order = sorted(range(len(losses)), key=lambda i: -losses[i])[:_SHOWN_SAMPLES]
    return tuple((i, losses[i] / total) for i in order)
