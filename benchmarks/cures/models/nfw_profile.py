"""Gravitational lensing: a halo profile with its parameters predicted."""

import torch
from torch import Tensor, nn


class NFWProfile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = torch.atanh(torch.sqrt((1 - x) / (1 + x)))
        outer = torch.atan(torch.sqrt((x.clamp(min=1.001) - 1) / (1 + x)))
        return torch.where(x < 1, inner, outer)


class Lens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.0))
        self.profile = NFWProfile()

    def forward(self, radius: Tensor) -> Tensor:
        return self.profile(radius / self.log_scale.exp())


class Simulator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lens = Lens()
        self.brightness = nn.Linear(1, 1)

    def forward(self, radius: Tensor) -> Tensor:
        return self.brightness(self.lens(radius)[:, None]).squeeze(-1)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Simulator()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.cat([torch.rand(4, generator=g) * 0.8 + 0.1, torch.rand(4, generator=g) * 3 + 1.1]),)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()
