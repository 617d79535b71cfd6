"""Rotation regression from a six-dimensional representation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GeodesicDistance(nn.Module):
    def forward(self, m1: Tensor, m2: Tensor) -> Tensor:
        m = torch.bmm(m1, m2.transpose(1, 2))
        cos = (m.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2
        return torch.acos(cos.clamp(-1.0, 1.0))  # culprit


class GeodesicLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.distance = GeodesicDistance()

    def forward(self, pred: Tensor, truth: Tensor) -> Tensor:
        return self.distance(pred, truth).mean()


class RotationNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 6)
        self.criterion = GeodesicLoss()

    def forward(self, points: Tensor, truth: Tensor) -> Tensor:
        a, b = self.net(points).chunk(2, dim=1)
        x = F.normalize(a)
        z = F.normalize(torch.linalg.cross(x, b))
        return self.criterion(torch.stack([x, torch.linalg.cross(z, x), z], dim=2), truth)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = RotationNet()
    nn.init.zeros_(model.net.weight)
    with torch.no_grad():
        model.net.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    quarter = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    return torch.randn(2, 3, generator=g), torch.stack([torch.eye(3), quarter])


def loss(output: Tensor) -> Tensor:
    return output
