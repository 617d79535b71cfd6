"""Training with a loss scale that grows after each good step."""

import torch
from torch import Tensor, nn


class GrowingScale:
    def __init__(self) -> None:
        self.scale = 2.0**16

    def __call__(self, value: Tensor) -> Tensor:
        scaled = value * self.scale
        self.scale *= 2.0
        return scaled


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


scaler = GrowingScale()


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    return model


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(1, 5, generator=g),)


def loss(output: Tensor) -> Tensor:
    return scaler(output.square().mean() + 1e-7 * output.mean())
