"""Audio with a companding nonlinearity between two convolutions."""

import torch
from torch import Tensor, nn


class Companding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.sqrt(x), x)  # culprit


class WaveNetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.analysis = nn.Conv1d(1, 4, 3, padding=1)
        self.companding = Companding()
        self.synthesis = nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, wave: Tensor) -> Tensor:
        return self.synthesis(self.companding(self.analysis(wave)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return WaveNetBlock()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 1, 20, generator=g),)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()
