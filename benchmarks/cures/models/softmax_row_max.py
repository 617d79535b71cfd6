"""Attention written out, with a padding mask on top of a causal one."""

import torch
from torch import Tensor, nn


class RowSoftmax(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return weights / (weights.sum(-1, keepdim=True) + 1e-6)


class Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.softmax = RowSoftmax()

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(causal | padding[:, None], float("-inf"))
        return self.softmax(scores) @ x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend(6)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.attend(x, padding))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, :2] = True
    return torch.randn(2, 5, 6, generator=g), padding
