"""A robust penalty that is linear above a threshold."""

import torch
from torch import Tensor, nn


class Blend(nn.Module):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        below = t * (x / t)
        return torch.where(x >= t, x, below)


class RobustModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
        self.blend = Blend()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.blend(self.net(x).abs(), t)


def make() -> nn.Module:
    torch.manual_seed(0)
    return RobustModel()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(5, 1, generator=g)
    t[1] = 0.0
    return torch.randn(5, 4, generator=g), t


def loss(output: Tensor) -> Tensor:
    return output.mean()
