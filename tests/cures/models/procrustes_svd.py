"""Knowledge graph embedding with a closed-form rotation per relation."""

import torch
from torch import Tensor, nn


class Procrustes(nn.Module):
    def forward(self, heads: Tensor, tails: Tensor) -> Tensor:
        correlation = heads.T @ tails
        u, _, vh = torch.linalg.svd(correlation)
        return u @ vh


class RelationModel(nn.Module):
    def __init__(self, entities: int = 8, width: int = 4) -> None:
        super().__init__()
        self.entities = nn.Embedding(entities, width)
        self.align = Procrustes()

    def forward(self, heads: Tensor, tails: Tensor) -> Tensor:
        h, t = self.entities(heads), self.entities(tails)
        return (h @ self.align(h, t) - t).square().sum(-1)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = RelationModel()
    nn.init.eye_(model.entities.weight)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.tensor([0, 2]) + 0 * seed, torch.tensor([1, 3])


def loss(output: Tensor) -> Tensor:
    return output.mean()
