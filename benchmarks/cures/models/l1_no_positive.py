"""An anchor-free detector: regression of the positive samples."""

import torch
from torch import Tensor, nn


class L1Loss(nn.Module):
    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).abs().mean()


class BBoxHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reg = nn.Linear(8, 4)
        self.obj = nn.Linear(8, 1)
        self.loss_l1 = L1Loss()

    def forward(self, x: Tensor, target: Tensor, positive: Tensor) -> Tensor:
        objectness = nn.functional.softplus(self.obj(x)).mean()
        return objectness + self.loss_l1(self.reg(x)[positive], target[positive])


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Linear(6, 8)
        self.bbox_head = BBoxHead()

    def forward(self, x: Tensor, target: Tensor, positive: Tensor) -> Tensor:
        return self.bbox_head(torch.relu(self.neck(x)), target, positive)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Detector()


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    positive = torch.zeros(10, dtype=torch.bool)
    return torch.randn(10, 6, generator=g), torch.rand(10, 4, generator=g), positive
