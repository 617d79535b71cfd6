"""Rules of optimizers whose update of an element depends on its whole matrix: Adafactor and Muon.

Written from Shazeer and Stern 2018, arXiv 1804.04235 (Adafactor), Jordan et al. 2024, "Muon: an optimizer for hidden
layers" (Muon), and torch's documentation. They need the state after the step, in which the gradient of it is already.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ...numerics.readable import local_shard
from .samples import WeightSample, number, plain, sample

# The size of Adafactor's update is a norm of the whole matrix, estimated from a sample. The one that fits the step is
# taken if it is that near, and what is checked then is the direction.
_NEAR = 4.0


def whole_weight(one: WeightSample) -> Tensor | None:
    """Return the weight, where this process holds all of it and it was sampled with its gradient."""
    x = one.tensor()
    is_sampled = one.before is not None and one.after is not None and one.gradient is not None
    return x if x is not None and is_sampled and local_shard(x) is None and plain(x) is not None else None


def _adafactor(one: WeightSample, x: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor | None:
    is_torchs = group.keys() >= {"beta2_decay", "d"}
    if not (
        is_torchs or group.keys() >= {"clip_threshold", "decay_rate", "relative_step", "scale_parameter"}
    ):
        return None
    row, column, whole = (
        state.get(key if is_torchs else other)
        for key, other in (
            ("row_var", "exp_avg_sq_row"),
            ("col_var", "exp_avg_sq_col"),
            ("variance", "exp_avg_sq"),
        )
    )
    sizes = _sizes_in_torch(one, group, state) if is_torchs else _sizes_in_transformers(group, state)
    if sizes is None or one.before is None or one.after is None or one.gradient is None:
        return None
    size, decay, least = sizes
    if isinstance(whole, Tensor) and whole.shape == x.shape:
        square = sample(whole).double()
    elif isinstance(row, Tensor) and isinstance(column, Tensor) and x.ndim == 2:
        stride = max(1, -(-x.numel() // len(one.before))) if len(one.before) < x.numel() else 1
        at = torch.arange(0, x.numel(), stride, device=x.device)
        rows, columns = row.flatten().double(), column.flatten().double()
        square = rows[at // x.shape[1]] * columns[at % x.shape[1]] / rows.mean().clamp_min(least)
    else:
        return None
    gradient = one.gradient.double()
    if len(square) != len(gradient) or group.get("maximize"):
        return None
    update = gradient * square.clamp_min(least * least).rsqrt()
    clip = number(group.get("d" if is_torchs else "clip_threshold")) or 1.0
    meant = size / max(1.0, float(update.square().mean().sqrt()) / clip)
    decayed = one.before.double() * (1 - decay)
    squares = float(update.dot(update))
    fits = float(update.dot(decayed - one.after.double())) / squares if squares else 0.0
    if not meant / _NEAR <= fits <= meant * _NEAR:
        if float((update != 0).double().mean()) < 0.5:
            return None  # too few for an estimate, as in the rows of an embedding
        fits = meant
    return decayed - fits * update


def _sizes_in_torch(
    one: WeightSample, group: dict[str, Any], state: dict[str, Any]
) -> tuple[float, float, float] | None:
    """Return the size of an update with the root mean square 1, the share that decays, and the least square."""
    lr, step, (least, scale) = number(group.get("lr")), number(state.get("step")), group["eps"]
    if lr is None or not step or one.before is None:
        return None
    norm = float(one.before.double().square().mean().sqrt())
    least = torch.finfo(one.before.dtype).eps if least is None else least
    return max(scale, norm) * min(lr, step**-0.5), lr * (number(group["weight_decay"]) or 0.0), least


def _sizes_in_transformers(group: dict[str, Any], state: dict[str, Any]) -> tuple[float, float, float] | None:
    lr, step, norm = number(group.get("lr")), number(state.get("step")), number(state.get("RMS"))
    if not step or norm is None or group.get("beta1") is not None:
        return None
    if group.get("relative_step"):
        lr = min(1e-6 * step if group.get("warmup_init") else 1e-2, step**-0.5)
    if lr is None:
        return None
    lr *= max(group["eps"][1], norm) if group.get("scale_parameter") else 1.0
    return lr, lr * (number(group.get("weight_decay")) or 0.0), sqrt(group["eps"][0])


def _muon(one: WeightSample, x: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor | None:
    buffer, lr, momentum = (
        state.get("momentum_buffer"),
        number(group.get("lr")),
        number(group.get("momentum")),
    )
    is_torchs = {"ns_coefficients", "adjust_lr_fn"} <= group.keys()
    if not is_torchs or lr is None or momentum is None or not isinstance(buffer, Tensor) or x.grad is None:
        return None
    whole = torch.lerp(x.grad, buffer, momentum) if group.get("nesterov") else buffer
    long, wide = x.shape
    adjusts = group["adjust_lr_fn"] or "original"
    scales = {"original": sqrt(max(1.0, long / wide)), "match_rms_adamw": 0.2 * sqrt(max(long, wide))}
    if adjusts not in scales:
        return None
    update = _orthogonal(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
    assert one.before is not None
    decayed = one.before.double() * (1 - lr * (number(group["weight_decay"]) or 0.0))
    return decayed - lr * scales[adjusts] * sample(update).double()


def _orthogonal(x: Tensor, factors: tuple[float, float, float], steps: int, least: float) -> Tensor:
    """Return about U V^T for x = U S V^T, by as many Newton-Schulz steps, in bfloat16 as the optimizer does."""
    own = x.bfloat16()
    own = own.T if x.shape[0] > x.shape[1] else own
    own = own / own.norm().clamp(min=least)
    a, b, c = factors
    for _ in range(steps):
        gram = own @ own.T
        own = torch.addmm(own, torch.addmm(gram, gram, gram, beta=b, alpha=c), own, beta=a)
    return own.T if x.shape[0] > x.shape[1] else own


_Rule = Callable[[WeightSample, Tensor, dict[str, Any], dict[str, Any]], "Tensor | None"]
MATRIX_RULES: dict[str, _Rule] = {"Adafactor": _adafactor, "Muon": _muon}
