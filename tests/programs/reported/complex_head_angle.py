"""A demodulator of phase-shift keying with a learned equaliser."""

import torch
from torch import Tensor, nn


class Demodulate(nn.Module):
    def forward(self, symbol: Tensor) -> Tensor:
        return torch.angle(symbol)  # culprit


class Equaliser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.tensor([1.0 + 0.1j, 0.0 + 0.0j]))

    def forward(self, received: Tensor) -> Tensor:
        delayed = torch.roll(received, 1, dims=-1)
        return self.taps[0] * received + self.taps[1] * delayed


class Receiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.equalise = Equaliser()
        self.demodulate = Demodulate()

    def forward(self, received: Tensor) -> Tensor:
        return self.demodulate(self.equalise(received))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Receiver()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    received = torch.randn(2, 8, dtype=torch.cfloat, generator=g)
    received[1, 3] = 1e-24 + 2e-24j
    return (received,)


def loss(output: Tensor) -> Tensor:
    return (1 - output.cos()).mean()
