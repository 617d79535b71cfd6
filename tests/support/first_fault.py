"""Oracle for a training that overflows: plain torch hooks that stop at the first non-finite output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class _Stopped(Exception):
    pass


def first_fault(model: nn.Module, train: Callable[[], Any]) -> str:
    """Return the name of the module with the first non-finite output in `train()`. All weights are finite then."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
        if not all(x.isfinite().all() for x in leaves if torch.is_tensor(x)):
            assert all(p.isfinite().all() for p in model.parameters())
            raise _Stopped(names[module])

    names = {module: name for name, module in model.named_modules()}
    handles = [module.register_forward_hook(hook) for module in names]
    try:
        train()
    except _Stopped as stopped:
        return str(stopped)
    finally:
        for handle in handles:
            handle.remove()
    raise AssertionError("nothing overflowed")
