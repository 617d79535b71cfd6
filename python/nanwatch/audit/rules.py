"""What SGD, Adam and AdamW would make of a weight in float64, by torch's own functions, from the state before a step.

Optimizers of other classes have no rule here, nor have those whose state holds more than the rule knows.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from .samples import StepSamples, WeightSample, number

_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
# The numbers that the groups of each class must have, and all that its state may have.
_Known = tuple[tuple[str, ...], frozenset[str]]
_UNKNOWN: _Known = (), frozenset()
_KNOWN: dict[str, _Known] = {
    "SGD": (("lr", "weight_decay", "momentum", "dampening"), frozenset({"momentum_buffer"})),
    "Adam": (("lr", "weight_decay", "eps"), _MOMENTS),
    "AdamW": (("lr", "weight_decay", "eps"), _MOMENTS),
}


def expected(name: str, weight: WeightSample, samples: StepSamples) -> Tensor | None:
    """Return the values in float64 that the rule of this name gives for a weight, None where it does not apply."""
    group = samples.groups[weight.group or 0]
    keys, known = _KNOWN.get(name, _UNKNOWN)
    numbers: dict[str, Any] = {key: value for key in keys if (value := number(group.get(key))) is not None}
    has_nan = any(isnan(value) for value in weight.state.values() if isinstance(value, float))
    is_known = bool(keys) and len(numbers) == len(keys) and weight.state.keys() <= known and not has_nan
    if weight.before is None or weight.gradient is None or samples.is_repeated or not is_known:
        return None
    if len(weight.gradient) != len(weight.before) or group.get("differentiable"):
        return None
    x, gradient = weight.before.to(torch.float64, copy=True), weight.gradient.to(torch.float64, copy=True)
    moments = {
        key: value.to(torch.float64, copy=True)
        for key, value in weight.state.items()
        if isinstance(value, Tensor)
    }
    is_maximized = bool(group.get("maximize"))
    if name == "SGD":
        buffers = [moments.get("momentum_buffer")]
        is_nesterov = bool(group.get("nesterov"))
        sgd(
            [x],
            [gradient],
            buffers,
            foreach=False,
            fused=False,
            nesterov=is_nesterov,
            maximize=is_maximized,
            **numbers,
        )
        return x
    beta1, beta2 = (number(beta) for beta in group.get("betas", (None, None)))
    if beta1 is None or beta2 is None:
        return None
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    mean, square, largest = (moments.get(key, torch.zeros_like(x)) for key in names)
    rule: Any = adamw if name == "AdamW" or group.get("decoupled_weight_decay") else adam
    numbers |= {
        "beta1": beta1,
        "beta2": beta2,
        "amsgrad": bool(group.get("amsgrad")),
        "maximize": is_maximized,
    }
    steps = [torch.tensor(weight.state.get("step", 0.0))]
    rule([x], [gradient], [mean], [square], [largest], steps, foreach=False, fused=False, **numbers)
    return x


def spacing(x: Tensor) -> Tensor:
    """Return the distance from each element to the next larger number of its format, in float64."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.abs().double().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)
