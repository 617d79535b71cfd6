"""Pose refinement that starts from the identity rotation."""

import torch
from torch import Tensor, nn


class QuaternionToAxisAngle(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        vector, scalar = q[:, 1:], q[:, 0]
        sin_squared = vector.square().sum(-1)
        sin_theta = torch.sqrt(sin_squared)
        two_theta = 2.0 * torch.atan2(sin_theta, scalar)
        k_pos = two_theta / sin_theta
        k_neg = 2.0 * torch.ones_like(sin_theta)
        return vector * torch.where(sin_squared > 0.0, k_pos, k_neg)[:, None]


class PoseRefiner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Linear(5, 3, bias=False)
        self.to_axis_angle = QuaternionToAxisAngle()

    def forward(self, features: Tensor) -> Tensor:
        vector = self.delta(features)
        return self.to_axis_angle(torch.cat([torch.ones(len(vector), 1), vector], dim=1))


def make() -> nn.Module:
    torch.manual_seed(0)
    model = PoseRefiner()
    nn.init.zeros_(model.delta.weight)
    return model


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 5, generator=g),)


def loss(output: Tensor) -> Tensor:
    return (output - 0.1).square().sum()
