"""Click prediction with a focal loss on probabilities."""

import torch
from torch import Tensor, nn


class FocalLoss(nn.Module):
    def __init__(self, gamma: float = 0.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, probs: Tensor, target: Tensor) -> Tensor:
        eps = 1e-8
        probs = torch.clamp(probs, eps, 1 - eps)
        positive = target * (1 - probs).pow(self.gamma) * torch.log(probs)
        negative = (1 - target) * probs.pow(self.gamma) * torch.log(1 - probs)
        return -(positive + negative).mean()


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.score = nn.Linear(8, 1)
        self.criterion = FocalLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        probs = torch.sigmoid(self.score(torch.tanh(self.trunk(x)))).squeeze(-1)
        return self.criterion(probs, target)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = ClickModel()
    with torch.no_grad():
        model.score.weight.fill_(10.0)
        model.trunk.weight.abs_()
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(6, 6, generator=g) + 2, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
