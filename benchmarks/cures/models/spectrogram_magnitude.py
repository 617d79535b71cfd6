"""A learned front end before a magnitude spectrogram."""

import torch
from torch import Tensor, nn


class Spectrogram(nn.Module):
    window: Tensor

    def __init__(self, n_fft: int = 16) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wave: Tensor) -> Tensor:
        spec = torch.stft(wave, self.n_fft, window=self.window, return_complex=True)
        return torch.sqrt(spec.real.pow(2) + spec.imag.pow(2))


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.preemphasis = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.spectrogram = Spectrogram()
        self.head = nn.Linear(9, 3)

    def forward(self, wave: Tensor) -> Tensor:
        spec = self.spectrogram(self.preemphasis(wave).squeeze(1))
        return self.head(spec.mean(-1))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Keyword()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    wave = torch.randn(2, 1, 64, generator=g)
    wave[0, :, 24:] = 0.0
    return (wave,)


def loss(output: Tensor) -> Tensor:
    return output.square().sum()
