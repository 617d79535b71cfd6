"""A detector with the focal loss of the original TensorFlow code."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FocalLoss(nn.Module):
    def __init__(self, alpha: float = 0.25, gamma: float = 1.5) -> None:
        super().__init__()
        self.alpha, self.gamma = alpha, gamma

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        neg_logits = -logits
        ce = torch.log1p(torch.exp(neg_logits))
        modulator = torch.exp(self.gamma * targets * neg_logits - self.gamma * F.softplus(neg_logits))
        loss = modulator * ((1.0 - targets) * logits + ce)
        return torch.where(targets == 1.0, self.alpha * loss, (1.0 - self.alpha) * loss).sum()


class ClassHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.predict = nn.Conv2d(4, 2, 1)
        self.loss_fn = FocalLoss()

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        return self.loss_fn(self.predict(F.silu(self.conv(features))), targets)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = ClassHead()
    nn.init.constant_(model.predict.bias, -95.0)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    targets = torch.zeros(1, 2, 6, 6)
    targets[0, 1, 2, 2] = 1.0
    return torch.randn(1, 4, 6, 6, generator=g), targets
