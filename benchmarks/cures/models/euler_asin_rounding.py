"""Character animation: joint angles from quaternions."""

import torch
from torch import Tensor, nn


class MiddleEuler(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        x, y, z, w = q.unbind(-1)
        return torch.asin(2.0 * (w * y - z * x))


class JointSolver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.residual = nn.Linear(8, 4)
        self.to_euler = MiddleEuler()
        self.out = nn.Linear(3, 3)

    def forward(self, markers: Tensor, joints: Tensor) -> Tensor:
        q = joints + 1e-9 * torch.tanh(self.residual(markers))[:, None]
        return self.out(self.to_euler(q))


def make() -> nn.Module:
    torch.manual_seed(0)
    return JointSolver()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    joints = torch.tensor([0.0, 0.0, 0.0, 1.0]).repeat(2, 3, 1)
    joints[1, 2] = torch.tensor([0.0, 0.70710683, 0.0, 0.70710683])
    return torch.randn(2, 8, generator=g), joints
