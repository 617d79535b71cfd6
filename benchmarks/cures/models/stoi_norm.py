"""Speech enhancement trained on a correlation of short-time segments."""

import torch
from torch import Tensor, nn

EPS = 1e-8


def row_normalise(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    norm = torch.sqrt(centred.square().sum(-1, keepdim=True))
    return centred / (norm + EPS)


class Intelligibility(nn.Module):
    def forward(self, estimate: Tensor, clean: Tensor) -> Tensor:
        a = row_normalise(estimate.unfold(-1, 8, 8))
        b = row_normalise(clean.unfold(-1, 8, 8))
        return -(a * b).sum(-1).mean()


class Enhancer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 4, 1, bias=False), nn.ReLU(), nn.Conv1d(4, 1, 1, bias=False))
        self.intelligibility = Intelligibility()

    def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
        return self.intelligibility(self.net(noisy), clean)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Enhancer()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    clean = torch.randn(2, 1, 32, generator=g)
    noisy = clean + 0.1 * torch.randn(2, 1, 32, generator=g)
    noisy[1, :, :8] = 0.0
    return noisy, clean


def loss(output: Tensor) -> Tensor:
    return output
