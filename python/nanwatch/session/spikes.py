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
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..diagnosis.postmortem import write_spike
from ..instrumentation.wrapped_names import find_module, named_modules
from ..monitoring.growth import WeightGrowth
from ..monitoring.spikes import CHANGED, LOGITS, OF_CALL, Evidence, Histories, Signal, cause_of
from ..numerics.readable import is_plain, only_our_dispatch
from ..recording.events import Event, PeakName, Recorder
from ..report.spike import Curve, Departure, SpikeReport
from ..util.job import rank
from ..util.suppressed import suppressed
from ..util.visible import spell, warn_user
from .optimizer_guard import OptimizerGuard
from .rerun_policy import RerunPolicy, is_due

_T = TypeVar("_T")
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"

# Jumps within so many steps belong to one spike.
_EPISODE = 16
_MOST_REPORTS = 16
# A learning rate jumps when it is so many times the median of the latest 16. It may be the cause for 32 steps.
_RATE_FACTOR, _RATE_STEPS, _RATE_LASTS = 3.0, 16, 32
# Squared gradient over Adam's second moment, as means over a weight: beyond 16 the step is several times too long. The
# gradients that left their history are looked at, and may be the cause for 16 steps.
_ADAM_RATIO, _ADAM_LASTS, _ADAM_LOOKS = 16.0, 16, 8
# Every so many steps: the limits of gradients anew, and norms and updates, the latter of so many elements of a weight.
_EVERY, _ELEMENTS = 32, 256
# Losses of so many samples are kept by sample.
_MOST_SAMPLES = 4096
_SHOWN_SAMPLES = 3
_SHOWN_CURVES = 6
_NORM, _UPDATE = "gradient norm", "update / weight"


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


class _Numbers:
    """Numbers of a tensor, copied now. Those of a GPU come later, and nobody waits for them."""

    def __init__(self, x: Tensor) -> None:
        self._event: Any = None
        with torch.no_grad(), only_our_dispatch():
            x = x.detach()
            if x.device.type == "cuda":
                x = x.to("cpu", non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                x = x.clone()
        self._host = x

    def read(self) -> list[float]:
        """Return the numbers, none as long as they have not come."""
        if self._event is not None and not self._event.query():
            return []
        return [float(one) for one in self._host.flatten().tolist()]


class _TooLarge(NamedTuple):
    """Gradient that left its history, and its square over Adam's second moment."""

    step: int
    gradient: Departure
    ratio: _Numbers


class SpikeWatch:
    """Part of a Watch with `spikes`: histories of its tensors, and reports of spikes.

    `told` gets each report. An exception in here ends the search for spikes, by one warning, and not the run.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        rerun: RerunPolicy,
        guard: OptimizerGuard,
        growth: WeightGrowth,
        output_dir: Path | None,
    ) -> None:
        self.reports: deque[SpikeReport] = deque(maxlen=_MOST_REPORTS)
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._rerun = rerun
        self._guard = guard
        self._growth = growth
        self._output_dir = output_dir
        self._turn = threading.Lock()
        self._forward, self._backward = Histories(), Histories()
        self._sampled = {_NORM: Histories(), _UPDATE: Histories()}
        self._loss, self._norm = Signal("loss", in_bits=False), Signal("gradients", in_bits=True)
        self._forwards: deque[tuple[int, Floats]] = deque(maxlen=_EPISODE)
        self._losses: deque[_Numbers] = deque(maxlen=_EPISODE)
        self._loss_at: int | None = None  # among the tensors of the forward: an output called loss
        self._scale: _Numbers | None = None
        self._first_scale: float | None = None
        self._num_skipped = 0
        self._step = 0
        self._quiet_until = 0
        self._num_spikes = 0
        self._rates: weakref.WeakKeyDictionary[Optimizer, deque[list[float]]] = weakref.WeakKeyDictionary()
        self._rate_jump: tuple[int, tuple[float, float]] | None = None
        self._weights: np.ndarray[Any, Any] = np.zeros(0, bool)  # of the gradients, those of weights
        self._levels: Floats = np.zeros(0)
        self._limits: Floats = np.zeros(0)
        self._too_large: deque[_TooLarge] = deque(maxlen=_ADAM_LOOKS * _ADAM_LASTS)
        self._before_update: tuple[list[weakref.ref[Tensor]], Tensor] | None = None
        self._coming: list[tuple[str, _Numbers]] = []
        recorder.gathers_gradient_peaks = True
        self._backward_starts = recorder.subscribe(Event.BACKWARD_START)

    def remove(self) -> None:
        """Gather no more, and keep the reports."""
        self._recorder.gathers_gradient_peaks = False
        self._backward_starts.remove()
        self._before_update = None

    @_harmless
    def note_loss(self, loss: Tensor | float) -> None:
        """Take a loss, or the losses of the samples of a batch."""
        x = loss if isinstance(loss, Tensor) else torch.tensor(float(loss))
        if is_plain(x) and x.device.type in ("cpu", "cuda") and x.numel():
            self._losses.append(_Numbers(x if x.numel() <= _MOST_SAMPLES else x.detach().mean()))

    @_harmless
    def take(self, batch: int, names: Sequence[PeakName], values: bytes) -> None:
        """Take the peaks of a batch as Recorder.take_peaks gives them, at the batch's end."""
        self._forward.meet(names)
        for place, (module, label, _) in enumerate(names, len(self._forward.names) - len(names)):
            if not module and label == "output[loss]":
                self._loss_at = place
        if batch >= 0 and torch.is_grad_enabled():  # else an evaluation
            self._forwards.append((batch, np.frombuffer(values)))

    @_harmless
    def backward_started(self) -> None:
        """Note the loss scale of a backward, and keep the batch for a capsule."""
        if self._guard.has_scaler or (self._step >= _EVERY and self._step & (self._step - 1) == 0):
            scale = self._guard.note_scale()
            self._scale = None if scale is None else _Numbers(scale)
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
            where = f"{found.files[0]} and Watch.spikes have" if found.files else "Watch.spikes has"
            warn_user(f"{found.summary}; {where} the report")

    @_harmless
    @torch.no_grad()
    def _judge(self, optimizer: Optimizer) -> SpikeReport | None:
        batch, names, found = self._recorder.take_gradient_peaks()
        self._backward.meet(names)
        is_weight = [OF_CALL.match(label) is None for _, label, _ in names]
        self._weights = np.append(self._weights, np.array(is_weight, bool))
        losses, self._losses = self._losses, deque(maxlen=_EPISODE)
        forwards, self._forwards = self._forwards, deque(maxlen=_EPISODE)
        if batch < 0:
            return None
        if (
            self._guard.num_skipped != self._num_skipped
        ):  # gradients of a step that was skipped are among these
            self._num_skipped = self._guard.num_skipped
            return None
        self._step += 1
        gradients = np.frombuffer(found) / self._relative_scale()
        forward = np.zeros(len(self._forward.names))
        for number, values in forwards:
            if number <= batch:
                forward[: len(values)] = np.maximum(forward[: len(values)], values)
        self._forward.add(forward)
        self._backward.add(gradients)
        by_sample = [one.read() for one in losses]
        means = [sum(one) / len(one) for one in by_sample if one]
        if not means and self._loss_at is not None and forward[self._loss_at]:
            means = [float(forward[self._loss_at])]
        loss = self._loss.add(sum(means) / len(means)) if means else None
        norm = self._norm.add(float(np.sqrt(np.square(gradients[self._weights]).sum())))
        self._note_optimizer(optimizer, gradients)
        self._sample()
        jumps = [one for one in (loss, norm) if one is not None]
        if not jumps:
            return None
        is_new = self._step > self._quiet_until
        self._quiet_until = self._step + _EPISODE
        self._num_spikes += is_new
        if not is_new or not is_due(self._num_spikes):
            return None
        return self._report(batch, jumps, [x for one in by_sample for x in one])

    def _relative_scale(self) -> float:
        """Return the loss scale over the first one that was known."""
        scale = next(iter(() if self._scale is None else self._scale.read()), None) or self._first_scale
        if scale is None:
            return 1.0
        self._first_scale = self._first_scale or scale
        return scale / self._first_scale

    def _note_optimizer(self, optimizer: Optimizer, gradients: Floats) -> None:
        """Note a learning rate that jumps, and the gradients that are large beside Adam's second moment."""
        rates = [float(one["lr"]) for one in optimizer.param_groups if not _is_elsewhere(one["lr"])]
        known = self._rates.setdefault(optimizer, deque(maxlen=_RATE_STEPS))
        if len(known) == _RATE_STEPS and (
            self._rate_jump is None or self._step > self._rate_jump[0] + _RATE_LASTS
        ):
            for i, rate in enumerate(rates):
                before = median(one[i] for one in known if len(one) > i)
                if 0 < before <= rate / _RATE_FACTOR:
                    self._rate_jump = self._step, (before, rate)
                    break
        known.append(rates)
        if self._step % _EVERY == 0:
            self._levels, self._limits = self._backward.limits()
        bits = self._backward.latest()
        far = np.flatnonzero(self._weights[: len(self._limits)] & (bits[: len(self._limits)] > self._limits))
        for place in far[:_ADAM_LOOKS].tolist():
            module, label = self._backward.names[place]
            ratio = self._adam_ratio(optimizer, module, label)
            if ratio is not None:
                usual, least = (
                    2.0 ** float(self._levels[place]),
                    inf if self._limits[place] == -inf else CHANGED,
                )
                gradient = Departure(module, label, float(gradients[place]), usual, least)
                self._too_large.append(_TooLarge(self._step, gradient, _Numbers(ratio)))

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
        steps, beta = state.get("step"), float(group["betas"][1])
        unbiased = 1 - beta ** float(steps) if steps is not None and not _is_elsewhere(steps) else 1.0
        with only_our_dispatch():
            square: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square()
            ratio: Tensor = square / (second.detach().sum(dtype=torch.float32) / max(unbiased, 1e-30))
        return ratio

    def _sample(self) -> None:
        """Take norms of gradients, and how far the sampled elements of the weights move in this step."""
        coming = []
        for kind, numbers in self._coming:
            values = numbers.read()
            if values:
                self._sampled[kind].add(np.array(values))
            else:
                coming.append((kind, numbers))
        self._coming = coming[-2:]
        if self._before_update is not None:
            kept, before = self._before_update
            self._before_update = None
            weights = [x for one in kept if (x := one()) is not None]
            if len(weights) == len(kept):
                moved = torch.stack(
                    [*torch._foreach_norm(list((_elements(weights) - before).split(_ELEMENTS)))]
                )
                size = torch.stack([*torch._foreach_norm(list(before.split(_ELEMENTS)))])
                self._coming.append((_UPDATE, _Numbers(moved / size)))
        if self._step % _EVERY:
            return
        own = self._own_weights()
        for kind, histories in self._sampled.items():
            histories.meet_only([(name, f"{kind} of {label}") for name, label, _ in own])
        if own:
            weights = [x for _, _, x in own]
            norms = torch._foreach_norm([x.grad for x in weights if x.grad is not None])
            self._coming.append((_NORM, _Numbers(torch.stack([one.float() for one in norms]))))
            self._before_update = [weakref.ref(x) for x in weights], _elements(weights)

    def _own_weights(self) -> list[tuple[str, str, Tensor]]:
        """Return the weights with gradients that one device holds, by module and label."""
        model = self._model()
        found: dict[int, tuple[str, str, Tensor]] = {}
        for name, _, module in () if model is None else named_modules(model):
            for label, x in module._parameters.items():
                if x is not None and x.grad is not None and x.numel() and is_plain(x) and is_plain(x.grad):
                    found.setdefault(id(x), (name, label, x))
        device = next((x.device for _, _, x in found.values()), None)
        return [one for one in found.values() if one[2].device == device and one[2].is_floating_point()]

    def _report(self, batch: int, jumps: list[Departure], losses: list[float]) -> SpikeReport:
        loss = None if self._loss_at is None else self._forward.names[self._loss_at]
        forward = [one for one in self._forward.departures() if (one.module, one.label) != loss]
        backward = self._backward.departures()
        large = [
            (one, ratio[0])
            for one in self._too_large
            if self._step - one.step <= _ADAM_LASTS
            and (ratio := one.ratio.read())
            and ratio[0] >= _ADAM_RATIO
        ]
        early = next((one.gradient for one, _ in large if one.step < self._step), None)
        rate = self._rate_jump
        rates = rate[1] if rate is not None and 0 < self._step - rate[0] <= _RATE_LASTS else None
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
                logits=self._forward.grown_logits(),
                loss_jumped=any(one.label == "loss" for one in jumps),
                rate_jumped=rates is not None,
                optimizer=early,
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
            self._growth.suspects(),
            tuple(self._curves(first, forward, backward)),
        )
        if self._output_dir is None:
            return report
        return write_spike(report, self._rerun.kept(batch), self._model(), self._output_dir)

    def _curves(
        self, first: Departure | None, forward: list[Departure], backward: list[Departure]
    ) -> Iterator[Curve]:
        yield from (one.curve() for one in (self._loss, self._norm))
        for histories, found in ((self._forward, forward), (self._backward, backward)):
            names = [(one.module, one.label) for one in ([] if first is None else [first]) + found]
            known = set(histories.names)
            for name in [one for one in dict.fromkeys(names) if one in known][:_SHOWN_CURVES]:
                yield histories.curve(name)
        for histories in self._sampled.values():
            for name in [one for one in histories.names if first is not None and one[0] == first.module]:
                yield histories.curve(name)


def _is_elsewhere(x: object) -> bool:
    """Return whether reading this number would wait for a device."""
    return isinstance(x, Tensor) and x.device.type != "cpu"


def _elements(weights: Sequence[Tensor]) -> Tensor:
    """Return some elements of each weight, evenly spaced, padded with zeros to the same number."""
    found = []
    for x in weights:
        flat = x.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS].float()
        found.append(torch.nn.functional.pad(some, (0, _ELEMENTS - some.numel())))
    return torch.cat(found)


def _shares(losses: list[float]) -> tuple[tuple[int, float], ...]:
    """Return the samples with the largest shares of the sum of the losses, and these shares."""
    total = sum(losses)
    if len(losses) < 2 or min(losses) < 0 or not total > 0:
        return ()
    order = sorted(range(len(losses)), key=lambda i: -losses[i])[:_SHOWN_SAMPLES]
    return tuple((i, losses[i] / total) for i in order)
