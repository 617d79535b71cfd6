"""Supervised contrastive pretraining."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SupConLoss(nn.Module):
    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        logits = features @ features.T / self.temperature
        others = 1 - torch.eye(len(labels))
        positives = (labels[:, None] == labels[None]).float() * others
        exp_logits = logits.exp() * others
        log_prob = logits - exp_logits.sum(1, keepdim=True).log()
        mean_log_prob = (positives * log_prob).sum(1) / positives.sum(1)
        return -mean_log_prob.mean()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.projector = nn.Linear(32, 8)
        self.criterion = SupConLoss()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = F.normalize(self.projector(self.trunk(x)), dim=-1)
        return self.criterion(z, labels)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, 16, generator=g), torch.tensor([0, 0, 1, 1, 2, 1])
