"""The hooks that a watch with gradients=True registers: at tensors, none at modules or their graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from support.recorders import WITH_DEVICE, watched

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.Linear(4, 1))


def graph_of(loss: Tensor) -> list[str]:
    """The kinds of its nodes, each by the first way to it: a full backward hook of a module would add some."""
    kinds, left, seen = [], [loss.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kinds.append(type(node).__name__)
        left += [one for one, _ in node.next_functions]
    return kinds


def hooks_of_modules(model: nn.Module) -> list[object]:
    """All that are registered, for one of its modules or for every module."""
    owners = [(one, kind) for one in model.modules() for kind in MODULE_HOOKS]
    owners += [(torch_module, kind) for kind in GLOBAL_HOOKS]
    return [hook for owner, kind in owners for hook in getattr(owner, kind).values()]


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_only_tensors_are_hooked(recorder: str) -> None:
    """No module and no registry of all modules has a hook, and the graph has the nodes of an unwatched one."""
    plain, model, x = model_of(), model_of(), torch.ones(2, 3, requires_grad=True)
    with watched(model, recorder, gradients=True) as w:
        loss = model(x).sum()
        assert graph_of(loss) == graph_of(plain(x).sum())
        assert hooks_of_modules(model) == []
        loss.backward()
        assert hooks_of_modules(model) == []
        assert sum(frame.phase == "backward" for frame in w.frames) == 5
