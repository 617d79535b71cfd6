"""Learning rates, gradients and optimizer states over the steps of a model, as evidence for the cause of a spike."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ...instrumentation.wrapped_names import find_module, named_modules
from ...numerics.readable import Numbers, is_plain, only_our_dispatch
from ...report.spike import Departure
from ..peaks import CHANGED, Floats, PeakHistory, Places

# A learning rate jumps when it is so many times the median of the latest 16. It may be the cause for 32 steps.
_RATE_FACTOR, _RATE_STEPS, _RATE_LASTS = 3.0, 16, 32
# Squared gradient over Adam's second moment, as means over a weight: beyond 16 the step is several times too long. The
# gradients that left their history are looked at, and may be the cause for 16 steps.
_ADAM_RATIO, _ADAM_LASTS, _ADAM_LOOKS = 16.0, 16, 8
# Every so many steps: the limits of gradients and the states anew, and the weight whose `.grad` is read in each step,
# which has at most so many elements.
_EVERY, _ELEMENTS = 32, 256
_WALKED = 8  # looks for weights until the modules are listed anew
# Averages of gradients and of their squares in the states of torch's optimizers.
_MEANS, _SQUARES = frozenset({"exp_avg", "momentum_buffer"}), frozenset({"exp_avg_sq", "square_avg"})
# An average that is so many times what the gradients explain was written by somebody else, as was a `.grad` that is so
# many times what its backward gave, by the largest of the latest ratios of both.
_UNEXPLAINED, _SPOILT, _RATIOS = 4.0, 16.0, 16


class TooLarge(NamedTuple):
    """Gradient that left its history, and its square over Adam's second moment."""

    step: int
    gradient: Departure
    ratio: Numbers


class _States(NamedTuple):
    """Largest magnitudes of an optimizer's averages in a step, by module, label and name of the average."""

    step: int
    names: list[tuple[str, str, str]]
    decays: list[float]
    norms: Numbers


class _Probe(NamedTuple):
    """A small weight whose `.grad` is read in each step, and the place of its gradient among those of weights."""

    weight: weakref.ref[Tensor]
    module: str
    label: str
    place: int


class StepHistory:
    """Learning rates of a model's steps, and gradients beside the states of its optimizer.

    No step waits for a GPU, and no tensor of the model is kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._rates: weakref.WeakKeyDictionary[Optimizer, deque[list[float]]] = weakref.WeakKeyDictionary()
        self._rate_jump: tuple[int, tuple[float, float]] | None = None
        self._levels: Floats = np.zeros(0)
        self._limits: Floats = np.zeros(0)
        self._too_large: deque[TooLarge] = deque(maxlen=_ADAM_LOOKS * _ADAM_LASTS)
        self._states: deque[_States] = deque(maxlen=2)
        self._probe: _Probe | None = None
        self._probed: deque[tuple[int, float, Numbers]] = deque(maxlen=_RATIOS + _ADAM_LASTS)
        self._named: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._walks = 0

    def add(
        self, step: int, optimizer: Optimizer, gradients: PeakHistory, weights: Places, values: Floats
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
        self._probe_gradient(step, values)
        if step % _EVERY == 0:
            self._sample(step, optimizer, gradients, weights)

    def rates(self, step: int) -> tuple[float, float] | None:
        """Return the learning rate before and after it jumped, if that was at one of the steps before this one."""
        found = self._rate_jump
        return found[1] if found is not None and 0 < step - found[0] <= _RATE_LASTS else None

    def too_large(self, step: int) -> list[tuple[TooLarge, float]]:
        """Return the latest gradients that were too large beside Adam's second moment, and how many times."""
        found = [(one, one.ratio.read()) for one in self._too_large if step - one.step <= _ADAM_LASTS]
        return [(one, ratio[0]) for one, ratio in found if ratio and ratio[0] >= _ADAM_RATIO]

    def spoilt(self, step: int) -> Departure | None:
        """Return the gradient that had been changed between its backward and one of the latest steps."""
        known = self._probes()
        for i, (at, given, taken) in enumerate(known):
            usual = given * max((one[2] / one[1] for one in known[max(0, i - _RATIOS) : i]), default=inf)
            if i >= _RATIOS // 2 and at < step and taken >= _SPOILT * usual and self._probe is not None:
                return Departure(self._probe.module, f"{self._probe.label}.grad", taken, usual, inf)
        return None

    def _probes(self) -> list[tuple[int, float, float]]:
        """Return latest steps, what the backward gave to a small weight, and what its `.grad` then was."""
        known = ((step, given, one.read()) for step, given, one in self._probed if given > 0)
        return [(step, given, max(map(abs, found))) for step, given, found in known if found]

    def unexplained(self, step: int, optimizer: Optimizer, gradients: PeakHistory) -> Departure | None:
        """Return an average in the optimizer's state that its gradients do not explain. Waits for its norm.

        An average is at most as large as the largest gradient, and one of squares falls no faster than it decays.
        """
        gains = [taken / given for _, given, taken in self._probes()]
        latest = self._averages(step, optimizer, self._own_weights(), _MEANS | _SQUARES)
        if not gains or latest is None:
            return None
        largest = gradients.largest()
        before = {
            name: (one.step, norm)
            for one in self._states
            if len(norms := one.norms.read()) == len(one.names)
            for name, norm in zip(one.names, norms, strict=True)
        }
        for (module, label, key), now, decay in zip(
            latest.names, latest.norms.wait(), latest.decays, strict=True
        ):
            gradient = max(gains) * largest.get((module, f"{label}.grad"), inf)
            if key in _MEANS:
                usual = gradient / (1 - decay) if key == "momentum_buffer" and decay < 1 else gradient
                is_far = now > _UNEXPLAINED * usual
            else:
                at, usual = before.get((module, label, key), (step, now))
                is_far = now < usual * decay ** (step - at) / _UNEXPLAINED
            if is_far:
                return Departure(module, f"{key} of {label}", now, usual, inf)
        return None

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

    def _probe_gradient(self, step: int, values: Floats) -> None:
        """Take a small weight's `.grad`, beside what its backward gave."""
        probe = self._probe
        gradient = None if probe is None or (x := probe.weight()) is None else x.grad
        if probe is not None and gradient is not None and is_plain(gradient):
            self._probed.append((step, float(values[probe.place]), Numbers(gradient)))

    def _choose_probe(
        self, weights: Sequence[tuple[str, str, Tensor]], gradients: PeakHistory, places: Places
    ) -> None:
        module, label, x = min(weights, key=lambda one: one[2].numel())
        if x.numel() > _ELEMENTS:
            return
        found = [i for i, at in enumerate(places) if gradients.names[at] == (module, f"{label}.grad")]
        if found and (self._probe is None or self._probe.weight() is not x):
            self._probe = _Probe(weakref.ref(x), module, label, found[0])
            self._probed.clear()

    def _averages(
        self,
        step: int,
        optimizer: Optimizer,
        weights: Sequence[tuple[str, str, Tensor]],
        keys: frozenset[str],
    ) -> _States | None:
        """Return the largest magnitudes of these averages that the optimizer keeps for weights."""
        names, states, decays = [], [], []
        decay_of = {id(x): _decays(group) for group in optimizer.param_groups for x in group["params"]}
        for module, label, x in weights:
            for key, state in optimizer.state.get(x, {}).items():
                if key in keys and isinstance(state, Tensor) and is_plain(state) and state.device == x.device:
                    names.append((module, label, key))
                    states.append(state)
                    decays.append(decay_of.get(id(x), (1.0, 1.0))[key in _SQUARES])
        if not states:
            return None
        with torch.no_grad(), only_our_dispatch():
            norms = torch.stack([*torch._foreach_norm(states, inf)]).float()
        return _States(step, names, decays, Numbers(norms))

    def _sample(self, step: int, optimizer: Optimizer, gradients: PeakHistory, places: Places) -> None:
        """Note the averages of squares, and choose the weight whose gradient is read in each step."""
        own = self._own_weights()
        held = {id(x) for group in optimizer.param_groups for x in group["params"]}
        stepped = [one for one in own if id(one[2]) in held]
        states = self._averages(step, optimizer, stepped, _SQUARES)
        if states is not None:
            self._states.append(states)
        if own:
            self._choose_probe(stepped or own, gradients, places)

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


def _decays(group: dict[str, Any]) -> tuple[float, float]:
    """Return how much an average of gradients and one of squares keeps in a step, 1 where that is unknown."""
    first, second, *_ = group.get("betas") or (group.get("momentum", 1.0), group.get("alpha", 1.0))
    return float(first) if _is_here(first) else 1.0, float(second) if _is_here(second) else 1.0


def _is_here(x: Any) -> bool:
    """Return whether this is a number, and reading it waits for no device."""
    return x.device.type == "cpu" if isinstance(x, Tensor) else isinstance(x, float | int)
