"""Modules and containers in half precision, or in float32 under autocast, for the tests of what widens them."""

from collections import namedtuple
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HALF = torch.float16
NARROW = [torch.float16, torch.bfloat16]
Pair = namedtuple("Pair", ["left", "right"])


class Block(nn.Module):
    """Two layers and a norm with running statistics; remembers the dtypes that it met."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.met: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        y = self.second(h)
        self.met = {x.dtype, h.dtype, y.dtype, self.second.weight.dtype, self.norm.running_mean.dtype}
        return y


@dataclass
class Plain:
    x: Tensor
    n: int = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    n: int = 3


def three(seed: int = 0) -> nn.Sequential:
    """A layer, a block of several, a layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 2))


def autocast(dtype: torch.dtype = HALF) -> torch.autocast:
    return torch.autocast("cpu", dtype)


def surroundings(is_half: bool) -> tuple[nn.Sequential, Tensor, Callable[[], AbstractContextManager[Any]]]:
    """A model, its input and the context to call it in: float16 weights, or float32 weights under autocast."""
    model, x = three(), torch.randn(5, 4)
    return (model.half(), x.half(), nullcontext) if is_half else (model, x, autocast)


both = pytest.mark.parametrize("is_half", [False, True], ids=["autocast", "half-weights"])
