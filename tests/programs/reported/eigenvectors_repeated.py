"""A layer that rotates features into the principal basis of a learned covariance."""

import torch
from torch import Tensor, nn


class PrincipalBasis(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.eye(width))

    def forward(self) -> Tensor:
        covariance = self.factor @ self.factor.T
        _, vectors = torch.linalg.eigh(covariance)  # culprit
        return vectors


class SpectralModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.basis = PrincipalBasis(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ self.basis()))


def make() -> nn.Module:
    torch.manual_seed(0)
    return SpectralModel()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(5, 4, generator=g),)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()
