"""Ridgeless regression in the features of a network."""

import torch
from torch import Tensor, nn


class LeastSquares(nn.Module):
    def forward(self, design: Tensor, y: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(design, full_matrices=False)
        inverse = vh.T @ torch.diag(1 / s) @ u.T
        return inverse @ y


class MetaRegressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(3, 3, bias=False)
        self.solve = LeastSquares()

    def forward(self, support: Tensor, y: Tensor, query: Tensor) -> Tensor:
        coefficients = self.solve(self.features(support), y)
        return self.features(query) @ coefficients


def make() -> nn.Module:
    torch.manual_seed(0)
    model = MetaRegressor()
    nn.init.eye_(model.features.weight)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    support = torch.cat([torch.eye(3), torch.zeros(1, 3)])
    return support, torch.randn(4, generator=g), torch.randn(5, 3, generator=g)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()
