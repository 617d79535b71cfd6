"""Multi-label chest x-ray classification where -1 marks a label that nobody annotated."""

import torch
from torch import Tensor, nn


class MaskedBCE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bce = nn.BCEWithLogitsLoss(reduction="none")

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        mask = (targets != -1).to(targets.dtype)
        loss = self.bce(logits, targets) * mask
        return loss.sum() / mask.sum()


class XrayClassifier(nn.Module):
    def __init__(self, findings: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(6, findings)
        self.criterion = MaskedBCE()

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self.head(self.backbone(images).flatten(1)), targets)


def make() -> nn.Module:
    torch.manual_seed(0)
    return XrayClassifier()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(2, 1, 12, 12, generator=g), torch.full((2, 5), -1.0)
