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
    kinds = {kind.__name__ for kind in type(optimizer).__mro__} & {"Adam", "AdamW", "SGD"}
    groups = [group for group in optimizer.param_groups if any(x is parameter for x in group["params"])]
    try:
        with torch.no_grad(), only_our_dispatch():
            state = {key: _local(value) for key, value in optimizer.state.get(parameter, {}).items()}
            if not (kinds and groups and (state or parameter.grad is not None)):
                return finding
            group, is_adam = groups[0], "SGD" not in kinds
            if is_adam:
                keys = ["exp_avg", "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
                update = f"exp_avg / ({keys[1]}.sqrt() + eps)"
            else:
                keys = ["momentum_buffer"] if state.get("momentum_buffer") is not None else []
                update = f"weight - lr * {keys[0] if keys else 'gradient'}"
            operands = [observe(state[x], f"{x}[{finding.label}]", "buffer", wanted=_COUNTED) for x in keys]
            if parameter.grad is not None:
                operands.append(observe(_local(parameter.grad), f"{finding.label}.grad", "gradient"))
            words = f"the step of {type(optimizer).__name__}, {update} with lr={float(group['lr']):g}"
            with_step = replace(finding, operation=words, operands=tuple(operands))
            return _with_eps(with_step, group, state, keys[1]) if is_adam else with_step
    except Exception:  # a state of another make
        suppressed("the step of an optimizer could not be taken apart")
    return finding


def _local(x: Any) -> Any:
    shard = local_shard(x) if isinstance(x, Tensor) else None
    return x if shard is None else shard


def _with_eps(finding: Finding, group: Mapping[str, Any], state: Mapping[str, Any], key: str) -> Finding:
    """Return the finding with the eps of Adam, and a larger one as the cure where it is 0 in the format of the state.

    The cure works if the update is finite with it, and a small multiple of lr.
    """
    root = state[key].sqrt() / math.sqrt(1 - float(group["betas"][1]) ** float(state["step"]))
    eps, format_name = float(group["eps"]), str(root.dtype).removeprefix("torch.")
    operation = f"{finding.operation} and eps={eps:g}"
    if float(torch.tensor(eps, dtype=root.dtype)):
        return replace(finding, operation=operation)
    ends = torch.finfo(root.dtype)
    # The smallest root that a square in this format has: a square below it is lost.
    smallest = math.sqrt(ends.smallest_normal * ends.eps)
    eps = max(1e-8, 10.0 ** math.floor(math.log10(smallest)))
    update = state["exp_avg"] / (root + eps)
    works = bool(update.isfinite().all()) and float(update.abs().max()) < 100
    remark = (
        f"a float32 copy of the weights for the optimizer, which keeps what {format_name} loses of squares, is a cure"
        " too; it was not tried"
    )
    return replace(
        finding,
        operation=f"{operation}, which is 0 in {format_name}",
        cures=(Cure(f"give the optimizer eps={eps:g}", works),),
        remarks=(*finding.remarks, remark),
    )
