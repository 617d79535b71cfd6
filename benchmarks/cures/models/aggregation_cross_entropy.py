"""Text recognition with the aggregation cross-entropy."""

import torch
from torch import Tensor, nn


class ACE(nn.Module):
    def forward(self, probs: Tensor, counts: Tensor) -> Tensor:
        aggregated = probs.mean(dim=1)
        counts = counts / probs.shape[1]
        return -torch.sum(torch.log(aggregated) * counts) / len(probs)


class LineReader(nn.Module):
    def __init__(self, characters: int = 6) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 12, batch_first=True)
        self.classify = nn.Linear(12, characters)
        self.ace = ACE()

    def forward(self, columns: Tensor, counts: Tensor) -> Tensor:
        h, _ = self.rnn(columns)
        return self.ace(torch.softmax(self.classify(h), dim=-1), counts)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = LineReader()
    with torch.no_grad():
        model.classify.bias[4] = -150.0
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    counts = torch.tensor([[6.0, 1.0, 1.0, 2.0, 0.0, 0.0], [5.0, 3.0, 0.0, 1.0, 1.0, 0.0]])
    return torch.randn(2, 10, 8, generator=g), counts
