"""Half-precision training with a fixed loss scale."""

import torch
from torch import Tensor, nn

LOSS_SCALE = 512.0


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Linear(16, 16)
        self.reg = nn.Linear(16, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.reg(torch.relu(self.neck(features)))  # culprit


def make() -> nn.Module:
    torch.manual_seed(0)
    return Regressor().half()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return ((120 * torch.randn(32, 16, generator=g)).half(),)


def loss(output: Tensor) -> Tensor:
    return output.float().square().sum(1).mean() * LOSS_SCALE
