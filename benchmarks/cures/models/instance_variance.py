"""A strided encoder with an instance norm after each level."""

import torch
from torch import Tensor, nn


class InstanceNorm(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=2, keepdim=True)
        var = x.var(dim=2, keepdim=True)
        return (x - mean) / torch.sqrt(var + self.eps)


class Down(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 2, stride=2)
        self.norm = InstanceNorm()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 3, 2, stride=2)
        self.down = Down(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(self.stem(x)).mean(-1))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(3, 1, 4, generator=g),)
