"""Attitude of a drone: pitch from a predicted quaternion."""

import torch
from torch import Tensor, nn


class Pitch(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        w, x, y, z = q.unbind(-1)
        sinp = 2.0 * (w * y - z * x)
        return torch.asin(sinp.clamp(-1.0, 1.0))


class AttitudeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.imu = nn.Linear(6, 4, bias=False)
        self.euler = Pitch()

    def forward(self, imu: Tensor, prior: Tensor) -> Tensor:
        return self.euler(prior + self.imu(imu))


def make() -> nn.Module:
    torch.manual_seed(0)
    model = AttitudeNet()
    nn.init.zeros_(model.imu.weight)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    prior = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, -0.5]])
    return torch.randn(2, 6, generator=g), prior


def loss(output: Tensor) -> Tensor:
    return output.sum()
