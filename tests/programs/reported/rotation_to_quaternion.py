"""Pose estimation: rotation matrices to quaternions."""

import torch
from torch import Tensor, nn


class RotationToQuaternion(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, r: Tensor) -> Tensor:
        trace = r.diagonal(dim1=-2, dim2=-1).sum(-1)
        sq = torch.sqrt(trace + 1.0) * 2.0  # culprit
        by_trace = torch.stack([0.25 * sq, r[:, 2, 1] - r[:, 1, 2]], dim=-1)
        sx = torch.sqrt(1.0 + r[:, 0, 0].abs() + self.eps) * 2.0
        by_axis = torch.stack([(r[:, 2, 1] - r[:, 1, 2]) / sx, 0.25 * sx], dim=-1)
        return torch.where((trace > 0.0)[:, None], by_trace, by_axis)


class PoseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.correction = nn.Linear(4, 9)
        self.to_quaternion = RotationToQuaternion()

    def forward(self, features: Tensor, rotation: Tensor) -> Tensor:
        return self.to_quaternion(rotation + self.correction(features).view(-1, 3, 3))


def make() -> nn.Module:
    torch.manual_seed(0)
    model = PoseNet()
    nn.init.zeros_(model.correction.weight)
    nn.init.zeros_(model.correction.bias)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    half_turn = torch.diag(torch.tensor([1.0, -1.0, -1.0]))
    return torch.randn(2, 4, generator=g), torch.stack([torch.eye(3), half_turn])


def loss(output: Tensor) -> Tensor:
    return output.square().sum()
