"""Two towers of a recommender, compared by their cosine."""

import torch
from torch import Tensor, nn


class UnitNormalization(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        square_sum = x.square().sum(-1, keepdim=True)
        inverse = torch.rsqrt(square_sum).clamp(max=1.0 / self.eps)
        return x * inverse


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(10, 6)
        self.items = nn.Embedding(10, 6, padding_idx=0)
        self.project = nn.Linear(6, 6, bias=False)
        self.unit = UnitNormalization()

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self.users(user), self.project(self.items(item))
        return (self.unit(u) * self.unit(i)).sum(-1)


def make() -> nn.Module:
    torch.manual_seed(0)
    return TwoTower()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    item = torch.randint(1, 10, (5,), generator=g)
    item[3] = 0
    return torch.randint(10, (5,), generator=g), item


def loss(output: Tensor) -> Tensor:
    return (1 - output).mean()
