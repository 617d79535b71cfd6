"""Rules of optimizers in float64, from the state before a step: what a step should make of a weight.

Written from the algorithms in torch's documentation (SGD, Adam, AdamW) and from Chen et al. 2023, arXiv 2302.06675
(Lion). Optimizers of other classes have no rule here, nor have those whose state holds more than the rule knows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ...numerics.readable import only_our_dispatch
from .matrix_rules import MATRIX_RULES, whole_weight
from .samples import StepSamples, WeightSample, number

_State = dict[str, Tensor | float]
Rule = Callable[[Tensor, Tensor, dict[str, Any], _State], Tensor | None]


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


def _adam(
    p: Tensor, g: Tensor, group: dict[str, Any], state: _State, *, decoupled: bool = False
) -> Tensor | None:
    lr, eps, decay = (number(group.get(key)) for key in ("lr", "eps", "weight_decay"))
    betas, step = group.get("betas"), state.get("step", 0.0)
    if lr is None or eps is None or decay is None or not isinstance(step, float) or betas is None:
        return None
    beta1, beta2 = (number(one) for one in betas)
    if beta1 is None or beta2 is None:
        return None
    step += 1
    g = -g if group.get("maximize") else g
    if decoupled or group.get("decoupled_weight_decay"):
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
    return _adam(p, g, group, state, decoupled=True)


def _lion(p: Tensor, g: Tensor, group: dict[str, Any], state: _State) -> Tensor | None:
    lr, decay = number(group.get("lr")), number(group.get("weight_decay"))
    betas = group.get("betas")
    if lr is None or decay is None or betas is None:
        return None
    beta1 = number(betas[0])
    if beta1 is None:
        return None
    return p * (1 - lr * decay) - lr * (beta1 * _wide(state, "exp_avg", p) + (1 - beta1) * g).sign()


_COMMON = frozenset({"lr", "weight_decay"})
# The rule of each class, the keys that its groups must have, and all that its state may have.
_RULES: dict[str, tuple[Rule, frozenset[str], frozenset[str]]] = {
    "SGD": (_sgd, _COMMON | {"momentum"}, frozenset({"momentum_buffer"})),
    "Adam": (
        _adam,
        _COMMON | {"betas", "eps"},
        frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    ),
    "AdamW": (
        _adamw,
        _COMMON | {"betas", "eps"},
        frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    ),
    "Lion": (_lion, _COMMON | {"betas"}, frozenset({"exp_avg"})),
}


def expect(samples: StepSamples, optimizer: Optimizer) -> None:
    """Fill in what the optimizer's rule gives for each sampled weight. Call it after the step."""
    of_matrix = MATRIX_RULES.get(samples.rule)
    with torch.no_grad(), only_our_dispatch():
        for one in samples.of_optimizer():
            group = samples.groups[one.group or 0]
            if of_matrix is None:
                one.expected = given(samples.rule, one, group)
            elif (x := whole_weight(one)) is not None and (state := optimizer.state.get(x, {})):
                one.expected = of_matrix(one, x, group, state)


def given(name: str, one: WeightSample, group: dict[str, Any]) -> Tensor | None:
    """Return what the rule of this name gives for a weight, None where it does not apply."""
    if name not in _RULES or one.before is None or one.gradient is None:
        return None
    rule, needed, known = _RULES[name]
    is_whole = (
        needed <= group.keys()
        and one.state.keys() <= known
        and not any(isnan(x) for x in one.state.values() if isinstance(x, float))
    )
    if len(one.gradient) != len(one.before) or not is_whole or group.get("differentiable"):
        return None
    return rule(one.before.double(), one.gradient.double(), group, one.state)


def is_known(kind: str) -> bool:
    """Return whether there is a rule for the optimizers of this class."""
    return kind in _RULES


def spacing(x: Tensor) -> Tensor:
    """Return the distance from each element to the next larger number of its format, in float64."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.abs().double().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)


def float32_moves(one: WeightSample) -> Tensor:
    """Return which elements the expected update would move if the weight were float32."""
    assert one.before is not None
    assert one.expected is not None
    return one.before.float() != one.expected.float()
