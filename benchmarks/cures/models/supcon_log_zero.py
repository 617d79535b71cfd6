"""Contrastive learning on features that are not normalised."""

import torch
from torch import Tensor, nn


class ContrastLoss(nn.Module):
    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        logits = features @ features.T / self.temperature
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        not_self = 1 - torch.eye(len(features))
        exp_logits = torch.exp(logits) * not_self
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
        return -((mask * not_self * log_prob).sum(1) / (mask * not_self).sum(1)).mean()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 16))
        self.loss_fn = ContrastLoss()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = (labels[:, None] == labels[None]).float()
        return self.loss_fn(self.encode(x), mask)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Encoder()
    with torch.no_grad():
        model.encode[2].weight.mul_(10)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, 10, generator=g) * 3, torch.tensor([0, 0, 1, 1, 2, 2])
