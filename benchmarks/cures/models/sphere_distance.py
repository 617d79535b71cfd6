"""Embeddings on the sphere, compared by their geodesic distance."""

import torch
from torch import Tensor, nn


class Sphere(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = (x * y).sum(-1).clamp(-1, 1)
        return torch.acos(inner)


class SphereEmbedding(nn.Module):
    def __init__(self, words: int = 8) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.eye(4).repeat(2, 1)[:words])
        self.sphere = Sphere()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x = self.points / self.points.norm(dim=-1, keepdim=True)
        return self.sphere(x[a], x[b])


def make() -> nn.Module:
    torch.manual_seed(0)
    return SphereEmbedding()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    a = torch.arange(4) + 0 * seed
    return a, torch.tensor([1, 5, 3, 0])


def loss(output: Tensor) -> Tensor:
    return output.square().mean()
