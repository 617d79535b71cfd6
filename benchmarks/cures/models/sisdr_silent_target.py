"""Speech separation with the scale-invariant signal-to-distortion ratio."""

import torch
from torch import Tensor, nn


class SISDRLoss(nn.Module):
    def __init__(self, eps: float = 1e-8) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, estimate: Tensor, target: Tensor) -> Tensor:
        energy = target.square().sum(-1, keepdim=True)
        alpha = (estimate * target).sum(-1, keepdim=True) / energy
        scaled = alpha * target
        residual = estimate - scaled
        ratio = scaled.square().sum(-1) / (residual.square().sum(-1) + self.eps)
        return -10 * torch.log10(ratio + self.eps).mean()


class Separator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 8, 5, padding=2)
        self.decoder = nn.Conv1d(8, 1, 5, padding=2)
        self.loss = SISDRLoss()

    def forward(self, mixture: Tensor, target: Tensor) -> Tensor:
        estimate = self.decoder(torch.relu(self.encoder(mixture)))
        return self.loss(estimate, target)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Separator()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(3, 1, 40, generator=g)
    mixture = target + 0.1 * torch.randn(3, 1, 40, generator=g)
    target[2] = 0.0
    return mixture, target
