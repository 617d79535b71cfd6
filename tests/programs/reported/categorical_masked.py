"""A policy with invalid actions masked out, and an entropy bonus."""

import torch
from torch import Tensor, nn


class CategoricalMasked(nn.Module):
    def forward(self, logits: Tensor, mask: Tensor) -> Tensor:
        logits = torch.where(mask, logits, float("-inf"))
        log_probs = logits - logits.logsumexp(-1, keepdim=True)
        return -(log_probs.exp() * log_probs).sum(-1)  # culprit


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.actor = nn.Linear(16, 5)
        self.dist = CategoricalMasked()

    def forward(self, observation: Tensor, mask: Tensor) -> Tensor:
        return self.dist(self.actor(self.network(observation)), mask).mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return Agent()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 5, generator=g) > 0.4
    mask[:, 0], mask[:, 4] = True, False
    return torch.randn(4, 6, generator=g), mask
