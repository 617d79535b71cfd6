"""Denoising of sequencing coverage with a correlation loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PearsonCorrelation(nn.Module):
    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        p = pred - pred.mean(-1, keepdim=True)
        t = target - target.mean(-1, keepdim=True)
        return (p * t).sum(-1) / (p.norm(dim=-1) * t.norm(dim=-1))


class MultiLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.correlation = PearsonCorrelation()

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(pred, target) + (1 - self.correlation(pred, target)).mean()


class CoverageDenoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 6, 7, padding=3), nn.ReLU(), nn.Conv1d(6, 1, 7, padding=3))
        self.loss = MultiLoss()

    def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
        return self.loss(self.net(noisy).squeeze(1), clean)


def make() -> nn.Module:
    torch.manual_seed(0)
    return CoverageDenoiser()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    clean = torch.rand(3, 50, generator=g)
    clean[0] = 0.0
    return clean[:, None] + 0.1 * torch.rand(3, 1, 50, generator=g), clean
