"""Soft actor-critic with a tanh bijector."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TanhLogDet(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(1 - torch.tanh(x).pow(2)).sum(-1)


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(6, 2)
        self.std = nn.Parameter(torch.zeros(2))
        self.squash = TanhLogDet()

    def forward(self, observation: Tensor, noise: Tensor) -> Tensor:
        std = F.softplus(self.std)
        x = self.mean(observation) + noise * std
        density = -0.5 * noise.square() - std.log() - 0.5 * math.log(2 * math.pi)
        return density.sum(-1) - self.squash(x)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Actor()
    with torch.no_grad():
        model.mean.weight.mul_(40)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, 6, generator=g), torch.randn(6, 2, generator=g)
