"""Semantic segmentation with more weight on the boundary pixels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MaskAttentionLoss(nn.Module):
    def __init__(self, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, target, reduction="none")
        mask_loss = losses[mask].mean()
        return losses.mean() + self.weight * mask_loss


class Segmenter(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 6, 3, padding=1)
        self.head = nn.Conv2d(6, classes, 1)
        self.criterion = MaskAttentionLoss()

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        edges = F.max_pool2d(target.float()[:, None], 3, 1, 1).squeeze(1) != target
        return self.criterion(self.head(torch.relu(self.body(image))), target, edges)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Segmenter()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(1, 1, 7, 7, generator=g), torch.full((1, 7, 7), 2)
