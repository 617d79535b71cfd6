"""Anomaly segmentation with a focal loss."""

import torch
from torch import Tensor, nn


class BinaryFocalLoss(nn.Module):
    def __init__(self, alpha: float = 0.25, gamma: float = 0.5, eps: float = 1e-6) -> None:
        super().__init__()
        self.alpha, self.gamma, self.eps = alpha, gamma, eps

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        probs = torch.sigmoid(logits)
        positive = -self.alpha * torch.pow(1.0 - probs, self.gamma) * target * torch.log(probs + self.eps)
        return positive.mean()


class AnomalyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(1, 1, 3, padding=1)
        self.criterion = BinaryFocalLoss()

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        return self.criterion(self.net(images), target)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = AnomalyNet()
    with torch.no_grad():
        model.net.weight.fill_(9.0)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    images = torch.rand(2, 1, 6, 6, generator=g)
    return images, (images > 0.3).float()


def loss(output: Tensor) -> Tensor:
    return output
