"""Proximal policy optimisation of a Gaussian policy."""

import torch
from torch import Tensor, nn


class ClippedSurrogate(nn.Module):
    def __init__(self, clip: float = 0.2) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
        ratio = (log_prob - old_log_prob).exp()  # culprit
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        return -torch.min(ratio * advantage, clipped * advantage).mean()


class GaussianActor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(5, 2)
        self.surrogate = ClippedSurrogate()

    def forward(self, state: Tensor, action: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
        log_prob = -0.5 * (action - self.mean(state)).square().sum(-1)
        return self.surrogate(log_prob, old_log_prob, advantage)


def make() -> nn.Module:
    torch.manual_seed(0)
    return GaussianActor()


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    old_log_prob = torch.full((6,), -2.0)
    advantage = torch.randn(6, generator=g)
    old_log_prob[3], advantage[3] = -140.0, 0.0
    return torch.randn(6, 5, generator=g), torch.randn(6, 2, generator=g), old_log_prob, advantage
