"""A language model that trains with an entropy bonus over the allowed tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EntropyFromLogits(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        logps = F.log_softmax(logits, dim=-1)
        return -(torch.exp(logps) * logps).sum(-1)


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.lm_head = nn.Linear(8, 12)
        self.monitor = EntropyFromLogits()

    def forward(self, tokens: Tensor, allowed: Tensor) -> Tensor:
        h, _ = self.rnn(self.embed(tokens))
        logits = self.lm_head(h).masked_fill(~allowed, float("-inf"))
        return self.monitor(logits)


def make() -> nn.Module:
    torch.manual_seed(0)
    return TinyLM()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    allowed = torch.ones(12, dtype=torch.bool)
    allowed[:3] = False
    return torch.randint(12, (2, 7), generator=g), allowed
