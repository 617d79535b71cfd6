"""What a step makes of a weight in float64, by the optimizer's own step over samples, from the state before it.

Optimizers of other classes have no rule here, nor have those whose state holds more than the rule knows.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .samples import StepSamples, WeightSample

_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
# Classes that treat each element alone, with all that their state may have.
_KNOWN: dict[type, frozenset[str]] = {
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
}


def expected(optimizer: Optimizer, weight: WeightSample, samples: StepSamples) -> Tensor | None:
    """Return the values in float64 that the optimizer's rule gives for a weight, None where it does not apply."""
    before, gradient, known = weight.before, weight.gradient, _KNOWN.get(type(optimizer))
    group = samples.groups[weight.group or 0]
    if known is None or before is None or gradient is None or len(gradient) != len(before):
        return None
    has_unknown = any(isinstance(value, float) and isnan(value) for value in weight.state.values())
    if samples.is_repeated or has_unknown or not weight.state.keys() <= known or group.get("differentiable"):
        return None
    x = before.to(torch.float64, copy=True)
    make: Any = type(optimizer)
    twin: Optimizer = make([x])
    twin.param_groups[0].update({**group, "foreach": False, "fused": False, "capturable": False})
    if weight.state:
        twin.state[x] = {
            key: value.double() if isinstance(value, Tensor) else torch.tensor(value)
            for key, value in weight.state.items()
        }
    x.grad = gradient.double()
    # Without PyTorch's hooks around it, of which some are the user's.
    step = type(optimizer).step
    with torch.no_grad():
        getattr(step, "__wrapped__", step)(twin)
    return x


def spacing(x: Tensor) -> Tensor:
    """Return the distance from each element to the next larger number of its format, in float64."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.abs().double().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)
