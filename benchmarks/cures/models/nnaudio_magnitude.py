"""A generator that is compared with a recording by convolutional spectra."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvSTFT(nn.Module):
    real: Tensor
    imag: Tensor

    def __init__(self, n_fft: int = 8) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(n_fft // 2 + 1.0), torch.arange(1.0 * n_fft)) * 2 * torch.pi / n_fft
        self.register_buffer("real", angle.cos()[:, None])
        self.register_buffer("imag", angle.sin()[:, None])

    def forward(self, wave: Tensor) -> Tensor:
        spec_real = F.conv1d(wave, self.real, stride=4)
        spec_imag = F.conv1d(wave, self.imag, stride=4)
        spec = spec_real.pow(2) + spec_imag.pow(2)
        return torch.sqrt(spec)


class Vocoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose1d(2, 1, 4, stride=4, bias=False)
        self.features = ConvSTFT()

    def forward(self, mel: Tensor, wave: Tensor) -> Tensor:
        return (self.features(self.upsample(mel)) - self.features(wave)).abs()


def make() -> nn.Module:
    torch.manual_seed(0)
    return Vocoder()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mel = torch.randn(2, 2, 10, generator=g)
    mel[0, :, 6:] = 0.0
    return mel, torch.randn(2, 1, 40, generator=g)


def loss(output: Tensor) -> Tensor:
    return output.mean()
