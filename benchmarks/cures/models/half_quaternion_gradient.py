"""Camera calibration in half precision; an unused camera has the zero quaternion."""

import torch
from torch import Tensor, nn


class NormaliseQuaternion(nn.Module):
    eps = 1e-12

    def forward(self, q: Tensor) -> Tensor:
        norm = q.abs().sum(-1, keepdim=True)
        unit = q / norm.clamp(min=self.eps)
        return torch.where(norm > 0, unit, q)


class Rig(nn.Module):
    def __init__(self, cameras: int = 4) -> None:
        super().__init__()
        self.quaternion = nn.Parameter(torch.randn(cameras, 4))
        self.normalise = NormaliseQuaternion()

    def forward(self, used: Tensor) -> Tensor:
        return self.normalise(self.quaternion * used[:, None])


def make() -> nn.Module:
    torch.manual_seed(0)
    return Rig().half()


def batch(seed: int = 0) -> tuple[Tensor]:
    used = torch.ones(4)
    used[2] = 0.0
    return ((used + 0 * seed).half(),)


def loss(output: Tensor) -> Tensor:
    return output.float().square().sum()
