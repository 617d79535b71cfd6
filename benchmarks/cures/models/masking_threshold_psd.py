"""Imperceptible perturbations of speech below a masking threshold."""

import torch
from torch import Tensor, nn


class PowerDensity(nn.Module):
    window: Tensor

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size))

    def forward(self, delta: Tensor) -> Tensor:
        spec = torch.stft(delta, self.size, window=self.window, center=False, return_complex=True)
        power = torch.sqrt(spec.real**2 + spec.imag**2).square()
        return power / power.amax().clamp(min=1e-10)


class Perturbation(nn.Module):
    def __init__(self, samples: int = 64) -> None:
        super().__init__()
        self.delta = nn.Parameter(0.1 * torch.randn(samples))
        self.psd = PowerDensity()

    def forward(self, active: Tensor, threshold: Tensor) -> Tensor:
        return torch.relu(self.psd(self.delta * active)[None] - threshold)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Perturbation()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    active = torch.ones(64)
    active[30:] = 0.0
    return active, torch.rand(1, 9, 1, generator=g) * 0.1


def loss(output: Tensor) -> Tensor:
    return output.mean()
