"""A low-rank adapter with a decomposed weight, on a layer that starts at zero."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DoRA(nn.Module):
    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, width) * 0.1)
        self.up = nn.Parameter(torch.zeros(width, rank))
        self.magnitude = nn.Parameter(torch.ones(width, 1))

    def forward(self, base: Tensor) -> Tensor:
        weight = base + self.up @ self.down
        weight_norm = weight.norm(dim=1, keepdim=True)
        return weight * (self.magnitude / weight_norm)


class ZeroProjection(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.adapter = DoRA(width)
        nn.init.zeros_(self.proj.weight)
        self.proj.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.adapter(self.proj.weight), self.proj.bias)


def make() -> nn.Module:
    torch.manual_seed(0)
    return ZeroProjection()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(3, 6, generator=g),)
