"""Sparse codes by a fractional norm."""

import torch
from torch import Tensor, nn


class FractionalNorm(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().pow(self.p).sum(-1)


class SparseCoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 8, bias=False)
        self.decode = nn.Linear(8, 5)
        self.sparsity = FractionalNorm(0.5)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encode(x)
        return (self.decode(code) - x).square().sum(-1) + 0.1 * self.sparsity(code)


def make() -> nn.Module:
    torch.manual_seed(0)
    return SparseCoder()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 5, generator=g)
    x[3] = 0.0
    return (x,)


def loss(output: Tensor) -> Tensor:
    return output.mean()
