"""Features for recognition: magnitude, then filter banks."""

import torch
from torch import Tensor, nn


class SpectralMagnitude(nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power

    def forward(self, stft: Tensor) -> Tensor:
        return stft.pow(2).sum(-1).pow(self.power)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Linear(2, 2, bias=False)
        self.magnitude = SpectralMagnitude(0.5)
        self.bank = nn.Linear(9, 4)

    def forward(self, stft: Tensor) -> Tensor:
        return self.bank(self.magnitude(self.mask(stft)))


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = Features()
        self.rnn = nn.GRU(4, 5, batch_first=True)

    def forward(self, stft: Tensor) -> Tensor:
        return self.rnn(self.features(stft))[0]


def make() -> nn.Module:
    torch.manual_seed(0)
    return Recogniser()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    stft = torch.randn(2, 12, 9, 2, generator=g)
    stft[1, 10:] = 0.0
    return (stft,)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()
