"""Rotation increments of a half-precision odometry network."""

import torch
from torch import Tensor, nn


class RotationLog(nn.Module):
    eps = 1e-8

    def forward(self, vector: Tensor) -> Tensor:
        norm = vector.abs().sum(-1, keepdim=True)
        scale = torch.where(norm > 0, norm, self.eps)
        angle = vector / scale
        return torch.where(norm > 0, angle * torch.atan(norm), torch.zeros_like(vector))


class Odometry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.motion = nn.Linear(4, 3, bias=False)
        self.log_map = RotationLog()

    def forward(self, frames: Tensor) -> Tensor:
        return self.log_map(self.motion(frames))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Odometry().half()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    frames = torch.randn(4, 4, generator=g)
    frames[0] = 0.0
    return (frames.half(),)


def loss(output: Tensor) -> Tensor:
    return output.float().square().sum()
