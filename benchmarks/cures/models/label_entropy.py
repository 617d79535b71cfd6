"""Learning from soft labels: samples are weighted by the entropy of their labels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Entropy(nn.Module):
    def forward(self, probs: Tensor) -> Tensor:
        return -(probs * torch.log(probs)).sum(-1)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weigh = Entropy()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, labels: Tensor) -> Tensor:
        return torch.exp(-self.temperature * self.weigh(labels))


class SoftLabelModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)
        self.router = Router()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses = -(labels * F.log_softmax(self.net(x), dim=-1)).sum(-1)
        return (self.router(labels) * losses).mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return SoftLabelModel()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.2, 0.8, 0.0]])
    return torch.randn(3, 5, generator=g), labels
