"""A semantic parser that scores the actions its grammar allows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def masked_log_softmax(vector: Tensor, mask: Tensor) -> Tensor:
    return F.log_softmax(vector + mask.log(), dim=-1)


class TransitionFunction(nn.Module):
    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, actions)

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        return masked_log_softmax(self.score(state), mask)


class SemanticParser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(5, 8, batch_first=True)
        self.decoder = TransitionFunction(8, 6)

    def forward(self, question: Tensor, mask: Tensor) -> Tensor:
        _, state = self.encoder(question)
        return self.decoder(state[0], mask)[:, 0]


def make() -> nn.Module:
    torch.manual_seed(0)
    return SemanticParser()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(3, 6)
    mask[1] = 0.0
    return torch.randn(3, 4, 5, generator=g), mask
