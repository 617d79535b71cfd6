"""Sequence to sequence with monotonic attention."""

import torch
from torch import Tensor, nn


class MonotonicAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.energy = nn.Linear(width, 1)

    def forward(self, memory: Tensor, previous: Tensor) -> Tensor:
        p = torch.sigmoid(self.energy(memory).squeeze(-1))
        ones = torch.ones(len(memory), 1)
        survive = torch.cat([ones, torch.cumprod(1 - p, dim=1)[:, :-1]], dim=1)
        return p * survive * torch.cumsum(previous / survive, dim=1)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(8, 8, batch_first=True)
        self.attention = MonotonicAttention(8)
        self.out = nn.Linear(8, 10)

    def forward(self, source: Tensor) -> Tensor:
        memory, _ = self.encoder(source)
        previous = torch.zeros(memory.shape[:2])
        previous[:, 0] = 1.0
        alpha = self.attention(memory, previous)
        return self.out((alpha.unsqueeze(1) @ memory).squeeze(1))


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Seq2Seq()
    nn.init.constant_(model.attention.energy.bias, 6.0)
    return model


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 60, 8, generator=g),)
