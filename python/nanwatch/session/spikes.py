"""Spikes of a Watch: what is gathered between two steps of an optimizer, and the report when a loss or gradient jumps.

All is read from what the recorder has read anyway, once for each step, before it changes a weight. Nothing waits for a
GPU: a number that has not come yet counts as missing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2, nan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..diagnosis.folder import write_spike
from ..monitoring.spikes import LEAST, LOGITS, OF_CALL, Histories, Places, Signal, StepHistory
from ..monitoring.suspicion import Suspicion
from ..numerics.readable import Numbers, is_plain
from ..recording.events import Event, PeakName, Recorder
from ..report.record import FrameRows
from ..report.spike import Cause, Curve, Departure, SpikeReport
from ..util.job import rank
from ..util.visible import spell, suppressed, warn_user
from .reports import is_due

if TYPE_CHECKING:
    from .optimizer_guard import OptimizerGuard
    from .rerun_policy import RerunPolicy

_T = TypeVar("_T")
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"

# Jumps within so many steps belong to one spike.
_EPISODE = 16
_MOST_REPORTS = 16
# Losses of so many samples are kept by sample.
_MOST_SAMPLES = 4096
_SHOWN_SAMPLES = 3
_SHOWN_CURVES = 6
# Attention logits saturate a softmax at about 100, which is where QK-clip begins.
_MANY_LOGITS, _GROWN_LOGITS = 100.0, 8.0


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


class SpikeWatch:
    """Part of a Watch with `spikes`: histories of its tensors, and reports of spikes.

    An exception in here ends the search for spikes, by one warning, and not the run.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        rerun: RerunPolicy,
        guard: OptimizerGuard,
        suspicion: Suspicion,
        output_dir: Path | None,
        note: Callable[[FrameRows], None] | None = None,
    ) -> None:
        self._note = note
        self.reports: deque[SpikeReport] = deque(maxlen=_MOST_REPORTS)
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._rerun = rerun
        self._guard = guard
        self._suspicion = suspicion
        self._output_dir = output_dir
        self._turn = threading.Lock()
        self._forward, self._backward = Histories(), Histories()
        self._steps = StepHistory(model)
        self._loss, self._norm = Signal("loss", in_bits=False), Signal("gradients", in_bits=True)
        self._new_names: deque[PeakName] = deque()  # of the forward: batches of other threads end at any time
        self._forwards: deque[tuple[int, Floats]] = deque(maxlen=_EPISODE)
        self._losses: deque[Numbers] = deque(maxlen=_EPISODE)
        self._loss_at: int | None = None  # among the tensors of the forward: an output called loss
        self._scale: Numbers | None = None
        self._first_scale: float | None = None
        self._num_skipped = 0
        self._step = 0
        self._quiet_until = 0
        self._num_spikes = 0
        self._weights: Places = np.zeros(0, np.intp)  # of the gradients, those of weights
        recorder.gathers_gradient_peaks = True
        self._backward_starts = recorder.subscribe(Event.BACKWARD_START)

    def remove(self) -> None:
        """Gather no more, and keep the reports."""
        self._recorder.gathers_gradient_peaks = False
        self._backward_starts.remove()
        self._steps.forget()

    @_harmless
    def note_loss(self, loss: Tensor | float) -> None:
        """Take a loss, or the losses of the samples of a batch."""
        x = loss if isinstance(loss, Tensor) else torch.tensor(float(loss))
        if is_plain(x) and x.device.type in ("cpu", "cuda") and x.numel():
            self._losses.append(Numbers(x if x.numel() <= _MOST_SAMPLES else x.detach().mean()))

    @_harmless
    def take(self, batch: int, names: Sequence[PeakName], values: bytes) -> None:
        """Take the peaks of a batch as Recorder.take_peaks gives them, at the batch's end."""
        self._new_names.extend(names)
        if batch >= 0 and torch.is_grad_enabled():  # else an evaluation
            self._forwards.append((batch, np.frombuffer(values)))

    @_harmless
    def backward_started(self) -> None:
        """Note the loss scale of a backward, and keep the batch for a capsule."""
        # The search for it takes 10 ms for a million objects.
        if self._guard.has_scaler or self._step in (LEAST, 16 * LEAST, 256 * LEAST):
            scale = self._guard.note_scale()
            self._scale = None if scale is None else Numbers(scale)
        if self._output_dir is not None:
            self._rerun.backward_failed(self._recorder.latest_batch)

    def before_step(self, optimizer: Optimizer) -> None:
        """Judge what came since the last step. Warn of a spike."""
        if not self._turn.acquire(blocking=False):  # another thread's step: waiting could lock up
            return
        try:
            found = self._judge(optimizer)
        finally:
            self._turn.release()
        if found is not None:
            self.reports.append(found)
            if self._note is not None:
                self._note(found.rows())
            where = f"{found.files[0]} and Watch.spikes have" if found.files else "Watch.spikes has"
            warn_user(f"{found.summary}; {where} the report")

    @_harmless
    def _judge(self, optimizer: Optimizer) -> SpikeReport | None:
        batch, names, found = self._recorder.take_gradient_peaks()
        self._backward.meet(names)
        if names:
            own = [i for i, (_, label) in enumerate(self._backward.names) if OF_CALL.match(label) is None]
            self._weights = np.array(own, np.intp)
        losses, self._losses = self._losses, deque(maxlen=_EPISODE)
        forwards, self._forwards = self._forwards, deque(maxlen=_EPISODE)
        self._meet()
        if batch < 0:
            return None
        if self._guard.num_skipped != self._num_skipped:  # gradients of a skipped step are among these
            self._num_skipped = self._guard.num_skipped
            return None
        self._step += 1
        scale, gradients = self._relative_scale(), np.frombuffer(found)
        if scale != 1:
            gradients = gradients / scale
        taken = [values for number, values in forwards if number <= batch]
        if len(taken) == 1 and len(taken[0]) == len(self._forward.names):
            (forward,) = taken
        else:
            forward = np.zeros(len(self._forward.names))
            for values in taken:
                forward[: len(values)] = np.maximum(forward[: len(values)], values[: len(forward)])
        self._forward.add(forward)
        self._backward.add(gradients)
        by_sample = [one.read() for one in losses]
        means = [sum(one) / len(one) for one in by_sample if one]
        if not means and self._loss_at is not None and forward[self._loss_at]:
            means = [float(forward[self._loss_at])]
        loss = self._loss.add(sum(means) / len(means)) if means else None
        of_weights = gradients[self._weights]
        norm = self._norm.add(sqrt(of_weights.dot(of_weights)))
        self._steps.add(self._step, optimizer, self._backward, self._weights, of_weights)
        jumps = [one for one in (loss, norm) if one is not None]
        if not jumps:
            return None
        is_new = self._step > self._quiet_until
        self._quiet_until = self._step + _EPISODE
        self._num_spikes += is_new
        if not is_new or not is_due(self._num_spikes):
            return None
        return self._report(batch, jumps, [x for one in by_sample for x in one])

    def _meet(self) -> None:
        names = [self._new_names.popleft() for _ in range(len(self._new_names))]
        self._forward.meet(names)
        for place, (module, label) in enumerate(self._forward.names if names else ()):
            if not module and label == "output[loss]":
                self._loss_at = place

    def _relative_scale(self) -> float:
        """Return the loss scale over the first one that was known."""
        scale = next(iter(() if self._scale is None else self._scale.read()), None) or self._first_scale
        if scale is None:
            return 1.0
        self._first_scale = self._first_scale or scale
        return scale / self._first_scale

    def _report(self, batch: int, jumps: list[Departure], losses: list[float]) -> SpikeReport:
        forward, backward = self._left_forward(), self._backward.departures()
        rates, large = self._steps.rates(self._step), self._steps.too_large(self._step)
        early = next((one for one, _ in large if one.step < self._step), None)
        # The forward of that step came before its gradient.
        if early is not None and self._left_forward(self._step - early.step):
            early = None
        outputs = [one for one in self._forward.names if one[1].startswith("output")]
        cause, first = cause_of(
            Evidence(
                forward,
                backward,
                first_gradients=[
                    *self._backward.names[:1],
                    *(one for one in self._backward.names if not one[0]),
                ],
                first_outputs=outputs[:1],
                logits=_grown_logits(self._forward),
                loss_jumped=any(one.label == "loss" for one in jumps),
                rate_jumped=rates is not None,
                optimizer=None if early is None else early.gradient,
            )
        )
        worst = max(large, key=lambda one: one[1], default=None)
        report = SpikeReport(
            batch,
            rank(),
            tuple(jumps),
            cause,
            first,
            tuple(forward),
            tuple(backward),
            rates,
            None if worst is None else (worst[0].gradient.module, worst[0].gradient.label, worst[1]),
            tuple(
                (module, 2.0**bits)
                for (module, label), bits in zip(
                    self._forward.names, self._forward.latest().tolist(), strict=True
                )
                if label in LOGITS and bits == bits
            ),
            _shares(losses),
            self._suspicion.suspects(),
            tuple(self._curves(first, forward, backward)),
        )
        if self._output_dir is None:
            return report
        return write_spike(report, self._rerun.kept(batch), self._model(), self._output_dir)

    def _left_forward(self, ago: int = 0) -> list[Departure]:
        """Return the tensors of the forward that left their history so many steps ago, but for the loss."""
        loss = None if self._loss_at is None else self._forward.names[self._loss_at]
        return [one for one in self._forward.departures(ago) if (one.module, one.label) != loss]

    def _curves(
        self, first: Departure | None, forward: list[Departure], backward: list[Departure]
    ) -> Iterator[Curve]:
        yield from (one.curve() for one in (self._loss, self._norm))
        for histories, found in ((self._forward, forward), (self._backward, backward)):
            names = [(one.module, one.label) for one in ([] if first is None else [first]) + found]
            known = set(histories.names)
            for name in [one for one in dict.fromkeys(names) if one in known][:_SHOWN_CURVES]:
                yield histories.curve(name)
        for histories in self._steps.sampled.values():
            for name in [one for one in histories.names if first is not None and one[0] == first.module]:
                yield histories.curve(name)


def _grown_logits(forward: Histories) -> Departure | None:
    """Return the attention logits of the module that has the largest, if they have grown to where softmax ends."""
    found = [
        Departure(name, label, 2.0**bits, 2.0**first, nan)
        for (name, label), bits, first in zip(
            forward.names, forward.latest().tolist(), forward.first.tolist(), strict=True
        )
        if label in LOGITS and bits >= log2(_MANY_LOGITS) and bits - first >= log2(_GROWN_LOGITS)
    ]
    return max(found, key=lambda one: one.value, default=None)


def _shares(losses: list[float]) -> tuple[tuple[int, float], ...]:
    """Return the samples with the largest shares of the sum of the losses, and these shares."""
    total = sum(losses)
    if len(losses) < 2 or min(losses) < 0 or not total > 0:
        return ()
    order = sorted(range(len(losses)), key=lambda i: -losses[i])[:_SHOWN_SAMPLES]
    return tuple((i, losses[i] / total) for i in order)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts about the step in which a loss or the gradients jumped: departures of the forward and of the backward.

    `first_outputs` and `first_gradients` are the tensors that the forward and the backward begin with. `logits` are
    attention logits that have grown, `optimizer` a gradient of a step before that was too large for Adam.
    """

    forward: Sequence[Departure]
    backward: Sequence[Departure]
    first_gradients: Sequence[tuple[str, str]]
    first_outputs: Sequence[tuple[str, str]]
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
