"""Monocular detection by keypoint heatmaps."""

import torch
from torch import Tensor, nn


class HeatmapLoss(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        prob = torch.sigmoid(logits)
        hot = target.eq(1).float()
        positive = torch.log(prob) * (1 - prob).pow(2) * hot
        negative = torch.log(1 - prob) * prob.pow(2) * (1 - target).pow(4) * (1 - hot)  # culprit
        return -(positive.sum() + negative.sum()) / hot.sum().clamp(min=1)


class KeypointDetector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3, padding=1)
        self.heatmap = nn.Conv2d(8, 1, 1)
        self.loss_heatmap = HeatmapLoss()

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        return self.loss_heatmap(self.heatmap(self.backbone(images).relu()), target)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = KeypointDetector()
    nn.init.constant_(model.heatmap.weight, 12.0)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    target = torch.zeros(1, 1, 8, 8)
    target[0, 0, 3, 4] = 1.0
    return torch.rand(1, 3, 8, 8, generator=g) * 4, target
