"""Models of the trainings in _rank_trainings.py: replicas, shards, experts, and what averages their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Step = Callable[[int], object]


def mlp(seed: int = 0) -> nn.Sequential:
    """Return a seeded model with a norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def average(model: nn.Module, but: nn.Module | None = None) -> Step:
    """Return what averages the gradients over the ranks, but not those of a part."""
    own = set() if but is None else {id(x) for x in but.parameters()}

    def reduce(_: int) -> None:
        for x in model.parameters():
            if id(x) not in own and x.grad is not None:
                dist.all_reduce(x.grad)
                x.grad /= dist.get_world_size()

    return reduce


def alone() -> Any:
    """Return the group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


class Summed(torch.autograd.Function):
    """Sums over the ranks in the forward or in the backward, as tensor parallelism does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
        """Sum now, or else in the backward."""
        ctx.now, x = now, x.clone()
        if now:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Sum what the forward did not."""
        gradient = gradient.clone()
        if not ctx.now:
            dist.all_reduce(gradient)
        return gradient, None


class Sharded(nn.Module):
    """A column and a row shard between replicated norms. Shards of one seed begin alike on all ranks."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.tail = nn.LayerNorm(8), nn.LayerNorm(4)
        self.column, self.row = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.dropout = nn.Dropout(dropout)
        torch.manual_seed(dist.get_rank())  # for the dropout

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the shards of all ranks."""
        hidden = self.dropout(torch.relu(self.column(Summed.apply(self.norm(x), False))))
        return self.tail(Summed.apply(self.row(hidden), True))


class Expert(nn.Module):
    """A shared trunk, and an expert a rank with a norm of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.gate, self.head = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 4)
        torch.manual_seed(seed)
        self.expert = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Add the experts of all ranks, by the gate."""
        hidden = self.trunk(x)
        share = self.gate(hidden).softmax(-1)[:, dist.get_rank() :][:, :1]
        return self.head(hidden + Summed.apply(share * self.expert(hidden), True))
