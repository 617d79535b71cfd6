"""Oracle for a training that overflows: plain torch hooks that stop at the first non-finite output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Stopped(Exception):
    """A hook saw what is not finite. `.fault` says where."""

    def __init__(self, fault: Any) -> None:
        super().__init__(fault)
        self.fault = fault


def stopped_at(train: Callable[[], Any], handles: Iterable[RemovableHandle]) -> Any:
    """The fault at which the hooks of these handles stop `train()`; they are removed."""
    try:
        train()
    except Stopped as stopped:
        return stopped.fault
    finally:
        for handle in handles:
            handle.remove()
    raise AssertionError("nothing overflowed")


def first_fault(model: nn.Module, train: Callable[[], Any]) -> str:
    """Return the name of the module with the first non-finite output in `train()`. All weights are finite then."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        leaves = [
            x for x in tree_leaves(dict(output) if isinstance(output, dict) else output) if torch.is_tensor(x)
        ]
        if not all(x.isfinite().all() for x in leaves):
            assert all(p.isfinite().all() for p in model.parameters())
            raise Stopped(names[module])

    names = {module: name for name, module in model.named_modules()}
    return stopped_at(train, [module.register_forward_hook(hook) for module in names])
