"""A physics-informed model with a drag term."""

import torch
from torch import Tensor, nn


class Drag(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x == 0, 0.0, x * x.sqrt())


class Vessel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.throttle = nn.Linear(3, 4, bias=False)
        self.drag = Drag()
        self.force = nn.Linear(4, 1)

    def forward(self, command: Tensor) -> Tensor:
        speed = self.throttle(command).abs()
        return self.force(speed - 0.1 * self.drag(speed))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Vessel()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    command = torch.randn(5, 3, generator=g)
    command[4] = 0.0
    return (command,)


def loss(output: Tensor) -> Tensor:
    return output.square().sum()
