"""Capsules with the squashing nonlinearity."""

import torch
from torch import Tensor, nn


class Squash(nn.Module):
    def forward(self, s: Tensor) -> Tensor:
        squared_norm = (s**2).sum(-1, keepdim=True)
        return torch.sqrt(squared_norm) * s / (1.0 + squared_norm)


class DigitCaps(nn.Module):
    def __init__(self, inputs: int, capsules: int, width: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(capsules, inputs, width) * 0.1)
        self.squash = Squash()

    def forward(self, u: Tensor) -> Tensor:
        return self.squash(torch.einsum("bi,ciw->bcw", u, self.W))


class CapsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Linear(16, 8, bias=False)
        self.digits = DigitCaps(8, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.digits(self.primary(x)).square().sum(-1)


def make() -> nn.Module:
    torch.manual_seed(0)
    return CapsNet()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(4, 16, generator=g)
    x[0] = 0.0
    return (x,)


def loss(output: Tensor) -> Tensor:
    return (0.9 - output[:, 0]).relu().square().mean()
