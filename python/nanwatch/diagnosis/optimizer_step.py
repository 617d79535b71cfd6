"""Step of an optimizer that made a weight non-finite, taken apart: the operation, its operands and the cure.

The state that the step left is computed with once more, in the formats of the state. Fused and foreach steps leave the
same state as plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..numerics.readable import local_shard, only_our_dispatch
from ..recording.events import Settings
from ..recording.observe import observe
from ..records.record import Record
from ..report.finding import Cure, Finding
from ..util.visible import suppressed

_COUNTED = Settings(counts=True)


class _Update(NamedTuple):
    """Update of a weight, `numerator / (root + eps)`: the keys of its operands, and both parts; root is None in SGD."""

    operation: str
    keys: tuple[str, ...]
    numerator: Tensor
    root: Tensor | None


def _adam(group: dict[str, Any], state: dict[str, Any], gradient: Tensor | None) -> _Update:
    key = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    correction = 1 - float(group["betas"][1]) ** float(state["step"])
    root = state[key].sqrt() / math.sqrt(correction)
    return _Update(f"exp_avg / ({key}.sqrt() + eps)", ("exp_avg", key), state["exp_avg"], root)


def _sgd(group: dict[str, Any], state: dict[str, Any], gradient: Tensor | None) -> _Update:
    momentum = state.get("momentum_buffer")
    if momentum is not None:
        return _Update("weight - lr * momentum_buffer", ("momentum_buffer",), momentum, None)
    assert gradient is not None
    return _Update("weight - lr * gradient", (), gradient, None)


_RULES: dict[str, Callable[[dict[str, Any], dict[str, Any], Tensor | None], _Update]] = {
    "Adam": _adam,
    "AdamW": _adam,
    "SGD": _sgd,
}


def take_apart(finding: Finding, optimizer: Optimizer, parameter: Tensor) -> Finding:
    """Return the finding of a non-finite weight with the operation of the step that wrote it, as far as it is known."""
    rule = next((rule for kind in type(optimizer).__mro__ if (rule := _RULES.get(kind.__name__))), None)
    groups = [group for group in optimizer.param_groups if any(x is parameter for x in group["params"])]
    state = optimizer.state.get(parameter)
    if rule is None or not groups or (state is None and parameter.grad is None):
        return finding
    try:
        with torch.no_grad(), only_our_dispatch():
            return _taken_apart(finding, type(optimizer).__name__, rule, groups[0], state or {}, parameter)
    except Exception:  # a state of another make
        suppressed("the step of an optimizer could not be taken apart")
        return finding


def _taken_apart(
    finding: Finding, name: str, rule: Any, group: dict[str, Any], state: dict[str, Any], parameter: Tensor
) -> Finding:
    gradient = None if parameter.grad is None else _local(parameter.grad)
    update = rule(group, {key: _local(value) for key, value in state.items()}, gradient)
    operands: list[Record] = [
        observe(state[key], f"{key}[{finding.label}]", "buffer", wanted=_COUNTED) for key in update.keys
    ]
    if gradient is not None:
        operands.append(observe(gradient, f"{finding.label}.grad", "gradient"))
    operation = f"the step of {name}, {update.operation} with lr={float(group['lr']):g}"
    cures, remarks = finding.cures, finding.remarks
    if (root := update.root) is not None:
        eps, format_name = float(group["eps"]), str(root.dtype).removeprefix("torch.")
        operation += f" and eps={eps:g}"
        if float(torch.tensor(eps, dtype=root.dtype)) == 0:
            operation += f", which is 0 in {format_name}"
            cures = (_larger_eps(update.numerator, root),)
            remarks = (
                *remarks,
                f"a float32 copy of the weights for the optimizer, which keeps what {format_name} loses of"
                " squares, is a cure too; it was not tried",
            )
    return replace(finding, operation=operation, operands=tuple(operands), cures=cures, remarks=remarks)


def _local(x: Any) -> Any:
    shard = local_shard(x) if isinstance(x, Tensor) else None
    return x if shard is None else shard


def _larger_eps(numerator: Tensor, root: Tensor) -> Cure:
    """Return the change to a larger eps. It works if the update is finite with it, and a small multiple of lr."""
    ends = torch.finfo(root.dtype)
    # The smallest root that a square in this format has: a square below it is lost.
    smallest = math.sqrt(ends.smallest_normal * ends.eps)
    eps = max(1e-8, 10.0 ** math.floor(math.log10(smallest)))
    update = numerator / (root + eps)
    works = bool(update.isfinite().all()) and float(update.abs().max()) < 100
    return Cure(f"give the optimizer eps={eps:g}", works)
