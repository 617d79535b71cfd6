"""A likelihood approximation network with a log-probability output."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LogProbabilityHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, h: Tensor) -> Tensor:
        x = self.linear(h)
        return -torch.log(1 + torch.exp(-x))


class TorchMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
        self.head = LogProbabilityHead(20)

    def forward(self, parameters: Tensor) -> Tensor:
        return F.dropout(self.head(self.layers(parameters)), 0.0)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = TorchMLP()
    nn.init.constant_(model.head.linear.bias, -100.0)
    return model


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(5, 4, generator=g),)
