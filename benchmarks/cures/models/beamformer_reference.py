"""Neural beamforming: attention over the reference channel."""

import torch
from torch import Tensor, nn


class AttentionReference(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = nn.Linear(channels, 8)
        self.gvec = nn.Linear(8, 1)

    def forward(self, psd: Tensor) -> Tensor:
        amplitude = torch.sqrt(psd.real**2 + psd.imag**2)
        return torch.softmax(self.gvec(torch.tanh(self.mlp(amplitude))).squeeze(-1), dim=-1)


class Beamformer(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.mask = nn.Linear(1, 1)
        self.reference = AttentionReference(channels)

    def forward(self, spec: Tensor) -> Tensor:
        weight = torch.sigmoid(self.mask(spec.abs().mean(1, keepdim=True).transpose(1, 2))).transpose(1, 2)
        psd = torch.einsum("bct,bdt->bcd", spec * weight, spec.conj())
        return (self.reference(psd)[:, :, None] * spec.abs()).sum(1)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Beamformer()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    spec = torch.randn(2, 3, 10, dtype=torch.cfloat, generator=g)
    spec[1, 2] = 0.0
    return (spec,)


def loss(output: Tensor) -> Tensor:
    return output.mean()
