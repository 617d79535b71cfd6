"""Colourisation with a loss in the Lab colour space."""

import torch
from torch import Tensor, nn


class XyzToLab(nn.Module):
    threshold = 0.008856

    def forward(self, xyz: Tensor) -> Tensor:
        power = torch.pow(xyz, 1 / 3)
        scale = 7.787 * xyz + 4.0 / 29.0
        f = torch.where(xyz > self.threshold, power, scale)
        x, y, z = f.unbind(1)
        return torch.stack([116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)], dim=1)


class Colouriser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(1, 3, 1, bias=False)
        self.lab = XyzToLab()

    def forward(self, grey: Tensor, target: Tensor) -> Tensor:
        return (self.lab(self.net(grey).abs()) - target).abs().mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return Colouriser()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    grey = torch.rand(2, 1, 5, 5, generator=g)
    grey[0, 0, :2] = 0.0
    return grey, torch.rand(2, 3, 5, 5, generator=g) * 50


def loss(output: Tensor) -> Tensor:
    return output
