"""The oracle for a training that overflows: plain torch hooks that stop at the first output that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Stopped(Exception):
    """A hook saw a non-finite output. `.name` is the module's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def first_fault(model: nn.Module, train: Callable[[], Any]) -> str:
    """The module of `model` whose output is the first in `train()` that is not finite, the weights still being so."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        leaves = [
            x for x in tree_leaves(dict(output) if isinstance(output, dict) else output) if torch.is_tensor(x)
        ]
        if not all(x.isfinite().all() for x in leaves):
            assert all(p.isfinite().all() for p in model.parameters())
            raise Stopped(names[module])

    names = {module: name for name, module in model.named_modules()}
    handles = [module.register_forward_hook(hook) for module in names]
    try:
        train()
    except Stopped as stopped:
        return stopped.name
    finally:
        for handle in handles:
            handle.remove()
    raise AssertionError("nothing overflowed")
