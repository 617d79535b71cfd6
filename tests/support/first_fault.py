"""Oracles of a training, by plain torch hooks: its first non-finite output, and its least headroom."""

from collections.abc import Callable
from math import inf, log2
from typing import Any

import torch
from torch import Tensor, nn
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


class LeastHeadroom:
    """Least headroom of all weights and outputs of a model in bits, by plain torch in forward hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.bits = inf
        for module in model.modules():
            module.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        for x in [*module.parameters(recurse=False), *tree_leaves(output)]:
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel() and x.count_nonzero():
                self.bits = min(
                    self.bits, log2(torch.finfo(x.dtype).max) - log2(float(x.detach().abs().max()))
                )

    def take(self) -> float:
        """Return it, and begin anew."""
        bits, self.bits = self.bits, inf
        return bits
