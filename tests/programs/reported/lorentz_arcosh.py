"""Hyperbolic embeddings in the Lorentz model."""

import torch
from torch import Tensor, nn


class Arcosh(nn.Module):
    def forward(self, inner: Tensor) -> Tensor:
        x = inner
        z = torch.sqrt(torch.clamp_min(x.pow(2) - 1.0, 1e-15))
        return torch.log(x + z)  # culprit


class Lorentz(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.arcosh = Arcosh()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        inner = u[:, 0] * v[:, 0] - (u[:, 1:] * v[:, 1:]).sum(-1)
        return self.arcosh(inner)


class HyperbolicEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(5, 4)
        self.manifold = Lorentz()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.manifold(self.lift(a), self.lift(b)).mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return HyperbolicEmbedding()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, 5, generator=g) * 2, torch.randn(6, 5, generator=g) * 2
