"""A point process whose rate is capped."""

import torch
from torch import Tensor, nn


class CappedRate(nn.Module):
    limit: Tensor

    def __init__(self, cap: float = 10.0) -> None:
        super().__init__()
        self.cap = cap
        self.register_buffer("limit", torch.tensor(cap).exp())

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x <= self.cap, torch.exp(x), self.limit)


class PointProcess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 6, batch_first=True)
        self.score = nn.Linear(6, 1)
        self.rate = CappedRate()

    def forward(self, events: Tensor, gap: Tensor) -> Tensor:
        h, _ = self.rnn(events)
        return self.rate(self.score(h).squeeze(-1) + gap)


def make() -> nn.Module:
    torch.manual_seed(0)
    return PointProcess()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    gap = torch.rand(2, 7, generator=g)
    gap[0, 5] = 250.0
    return torch.randn(2, 7, 2, generator=g), gap


def loss(output: Tensor) -> Tensor:
    return output.log1p().mean()
