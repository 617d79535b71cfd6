"""A learned optimiser that normalises the rows of an update and keeps its norm."""

import torch
from torch import Tensor, nn


class RowNormalisedUpdate(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(rows, 1))

    def forward(self, u: Tensor) -> Tensor:
        norm = u.norm()
        moment = u.square().mean(1, keepdim=True)
        scaled = self.gain * u / (moment + 1e-8).sqrt()
        norm_new = scaled.norm()
        ratio = norm / norm_new
        return scaled * ratio


class MetaOptimiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Linear(6, 6, bias=False)
        self.update = RowNormalisedUpdate(4)

    def forward(self, gradients: Tensor) -> Tensor:
        return torch.stack([self.update(self.filter(g)) for g in gradients])


def make() -> nn.Module:
    torch.manual_seed(0)
    return MetaOptimiser()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    gradients = torch.randn(3, 4, 6, generator=g)
    gradients[2] = 0.0
    return (gradients,)
