"""Step of an optimizer that made a weight non-finite, taken apart: the operation, its operands and the cure.

The state that the step left is computed with once more, in the formats of the state. Fused and foreach steps leave the
same state as plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..numerics.readable import local_shard, only_our_dispatch
from ..recording.events import Settings
from ..recording.observe import observe
from ..report.finding import Cure, Finding
from ..util.visible import suppressed

_COUNTED = Settings(counts=True)


def take_apart(finding: Finding, optimizer: Optimizer, parameter: Tensor) -> Finding:
    """Return the finding of a non-finite weight with the operation of the step that wrote it, as far as it is known."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    groups = [group for group in optimizer.param_groups if any(x is parameter for x in group["params"])]
    state = optimizer.state.get(parameter) or {}
    if not groups or not (state or parameter.grad is not None):
        return finding
    try:
        with torch.no_grad(), only_our_dispatch():
            state = {key: _local(value) for key, value in state.items()}
            gradient = _local(parameter.grad)
            if kinds & {"Adam", "AdamW"}:
                key = "max_exp_avg_sq" if groups[0]["amsgrad"] else "exp_avg_sq"
                with_operands = _with_operands(finding, ("exp_avg", key), state, gradient)
                return _of_adam(with_operands, type(optimizer).__name__, groups[0], state, key)
            if "SGD" in kinds:
                keys = ("momentum_buffer",) if state.get("momentum_buffer") is not None else ()
                with_operands = _with_operands(finding, keys, state, gradient)
                update = f"weight - lr * {keys[0] if keys else 'gradient'}"
                return replace(with_operands, operation=_words(type(optimizer).__name__, update, groups[0]))
    except Exception:  # a state of another make
        suppressed("the step of an optimizer could not be taken apart")
    return finding


def _local(x: Any) -> Any:
    shard = local_shard(x) if isinstance(x, Tensor) else None
    return x if shard is None else shard


def _with_operands(
    finding: Finding, keys: tuple[str, ...], state: Mapping[str, Any], gradient: Tensor | None
) -> Finding:
    """Return the finding with these tensors of the state as the operands, and the gradient if it is there."""
    operands = [observe(state[key], f"{key}[{finding.label}]", "buffer", wanted=_COUNTED) for key in keys]
    if gradient is not None:
        operands.append(observe(gradient, f"{finding.label}.grad", "gradient"))
    return replace(finding, operands=tuple(operands))


def _words(name: str, update: str, group: Mapping[str, Any]) -> str:
    return f"the step of {name}, {update} with lr={float(group['lr']):g}"


def _of_adam(
    finding: Finding, name: str, group: Mapping[str, Any], state: Mapping[str, Any], key: str
) -> Finding:
    """Return the finding with the step of Adam, and a larger eps as the cure where its format has none."""
    root = state[key].sqrt() / math.sqrt(1 - float(group["betas"][1]) ** float(state["step"]))
    eps, format_name = float(group["eps"]), str(root.dtype).removeprefix("torch.")
    operation = f"{_words(name, f'exp_avg / ({key}.sqrt() + eps)', group)} and eps={eps:g}"
    if float(torch.tensor(eps, dtype=root.dtype)):
        return replace(finding, operation=operation)
    remark = (
        f"a float32 copy of the weights for the optimizer, which keeps what {format_name} loses of squares, is a cure"
        " too; it was not tried"
    )
    return replace(
        finding,
        operation=f"{operation}, which is 0 in {format_name}",
        cures=(_larger_eps(state["exp_avg"], root),),
        remarks=(*finding.remarks, remark),
    )


def _larger_eps(numerator: Tensor, root: Tensor) -> Cure:
    """Return the change to a larger eps. It works if the update is finite with it, and a small multiple of lr."""
    ends = torch.finfo(root.dtype)
    # The smallest root that a square in this format has: a square below it is lost.
    smallest = math.sqrt(ends.smallest_normal * ends.eps)
    eps = max(1e-8, 10.0 ** math.floor(math.log10(smallest)))
    update = numerator / (root + eps)
    works = bool(update.isfinite().all()) and float(update.abs().max()) < 100
    return Cure(f"give the optimizer eps={eps:g}", works)
