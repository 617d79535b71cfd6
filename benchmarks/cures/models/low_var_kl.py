"""Reinforcement learning of a policy with a KL term to the reference."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LowVarianceKL(nn.Module):
    def forward(self, log_prob: Tensor, reference: Tensor) -> Tensor:
        log_ratio = reference - log_prob
        return torch.exp(log_ratio) - log_ratio - 1


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.kl = LowVarianceKL()

    def forward(self, tokens: Tensor, actions: Tensor, reference: Tensor) -> Tensor:
        log_probs = F.log_softmax(self.head(self.embed(tokens)), dim=-1)
        chosen = log_probs.gather(-1, actions[..., None]).squeeze(-1)
        return self.kl(chosen, reference).mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Policy()
    with torch.no_grad():
        model.head.bias[3] = -110.0
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    actions = torch.randint(4, 16, (2, 6), generator=g)
    actions[1, 2] = 3
    return torch.randint(16, (2, 6), generator=g), actions, torch.full((2, 6), -2.5)
