"""A policy that samples from a truncated normal through the inverse of its distribution."""

import torch
from torch import Tensor, nn


class TruncatedNormal(nn.Module):
    def forward(self, mean: Tensor, uniform: Tensor) -> Tensor:
        return mean + 2**0.5 * torch.erfinv(2 * uniform - 1)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(4, 2)
        self.sample = TruncatedNormal()

    def forward(self, state: Tensor, uniform: Tensor) -> Tensor:
        return self.sample(self.mean(state), uniform)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Policy()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    uniform = torch.rand(5, 2, generator=g)
    uniform[1, 0] = 0.0
    return torch.randn(5, 4, generator=g), uniform
