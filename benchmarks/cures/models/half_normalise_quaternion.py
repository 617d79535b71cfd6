"""Quaternions from a half-precision backbone."""

import torch
from torch import Tensor, nn


class NormaliseQuaternion(nn.Module):
    eps = 1.0e-12

    def forward(self, q: Tensor) -> Tensor:
        return q / q.norm(dim=-1, keepdim=True).clamp_min(self.eps)


class PoseHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4, bias=False)
        self.normalise = NormaliseQuaternion()

    def forward(self, h: Tensor) -> Tensor:
        return self.normalise(self.fc(h))


class Tracker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(5, 6, bias=False)
        self.pose = PoseHead()

    def forward(self, x: Tensor) -> Tensor:
        return self.pose(torch.tanh(self.backbone(x)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Tracker().half()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, generator=g)
    x[1] = 0.0
    return (x.half(),)
