"""Rules of SGD, Adam and AdamW in float64, from the state before a step: what a step should make of a weight.

Written from the algorithms in torch's documentation. Optimizers of other classes have no rule here, nor have those
whose state holds more than the rule knows.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import torch
from torch import Tensor

from .samples import StepSamples, WeightSample, number

_State = dict[str, Tensor | float]


def _wide(state: _State, key: str, like: Tensor) -> Tensor:
    value = state.get(key)
    return value.double() if isinstance(value, Tensor) else torch.zeros_like(like)


def _sgd(p: Tensor, g: Tensor, group: dict[str, Any], state: _State) -> Tensor | None:
    lr, momentum, decay = (number(group.get(key, 0)) for key in ("lr", "momentum", "weight_decay"))
    dampening = number(group.get("dampening", 0))
    if lr is None or momentum is None or decay is None or dampening is None:
        return None
    g = (-g if group.get("maximize") else g) + decay * p
    if momentum:
        is_first = not isinstance(state.get("momentum_buffer"), Tensor)
        buffer = g if is_first else momentum * _wide(state, "momentum_buffer", p) + (1 - dampening) * g
        g = g + momentum * buffer if group.get("nesterov") else buffer
    return p - lr * g


def _adam(p: Tensor, g: Tensor, group: dict[str, Any], state: _State) -> Tensor | None:
    lr, eps, decay = (number(group.get(key)) for key in ("lr", "eps", "weight_decay"))
    step, betas = state.get("step", 0.0), [number(beta) for beta in group["betas"]]
    if lr is None or eps is None or decay is None or not isinstance(step, float):
        return None
    beta1, beta2 = betas
    if beta1 is None or beta2 is None:
        return None
    step += 1
    g = -g if group.get("maximize") else g
    if group.get("decoupled_weight_decay"):
        p = p * (1 - lr * decay)
    else:
        g = g + decay * p
    mean = beta1 * _wide(state, "exp_avg", p) + (1 - beta1) * g
    square = beta2 * _wide(state, "exp_avg_sq", p) + (1 - beta2) * g * g
    if group.get("amsgrad"):
        square = torch.maximum(square, _wide(state, "max_exp_avg_sq", p))
    root = (square / (1 - beta2**step)).sqrt() + eps
    moved: Tensor = p - lr * mean / (1 - beta1**step) / root
    return moved


def _adamw(p: Tensor, g: Tensor, group: dict[str, Any], state: _State) -> Tensor | None:
    return _adam(p, g, {**group, "decoupled_weight_decay": True}, state)


_COMMON = frozenset({"lr", "weight_decay"})
_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
# The rule of each class, the keys that its groups must have, and all that its state may have.
_RULES = {
    "SGD": (_sgd, _COMMON | {"momentum"}, frozenset({"momentum_buffer"})),
    "Adam": (_adam, _COMMON | {"betas", "eps"}, _MOMENTS),
    "AdamW": (_adamw, _COMMON | {"betas", "eps"}, _MOMENTS),
}


def expected(name: str, weight: WeightSample, samples: StepSamples) -> Tensor | None:
    """Return the values in float64 that the rule of this name gives for a weight, None where it does not apply."""
    if name not in _RULES or weight.before is None or weight.gradient is None or samples.is_repeated:
        return None
    rule, needed, known = _RULES[name]
    group = samples.groups[weight.group or 0]
    is_known = needed <= group.keys() and weight.state.keys() <= known
    has_nan = any(isnan(value) for value in weight.state.values() if isinstance(value, float))
    if len(weight.gradient) != len(weight.before) or not is_known or has_nan or group.get("differentiable"):
        return None
    return rule(weight.before.double(), weight.gradient.double(), group, weight.state)


def spacing(x: Tensor) -> Tensor:
    """Return the distance from each element to the next larger number of its format, in float64."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.abs().double().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)
