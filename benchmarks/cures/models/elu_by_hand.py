"""A flow whose scales are positive by an exponential unit."""

import torch
from torch import Tensor, nn


class PositiveELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x <= 0, torch.exp(x), 1 + x)


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 4)
        self.act = PositiveELU()

    def forward(self, x: Tensor) -> Tensor:
        raw, shift = self.net(x[:, :2]).chunk(2, dim=1)
        scale = self.act(raw)
        return torch.cat([x[:, :2], scale * x[:, 2:] + shift], dim=1)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Coupling()
    with torch.no_grad():
        model.net.weight[0].copy_(torch.tensor([0.5, -0.5]))
    return model


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 4, generator=g)
    x[1, :2] = torch.tensor([400.0, -400.0])
    return (x,)


def loss(output: Tensor) -> Tensor:
    return 0.5 * output.square().sum(1).mean()
