"""A volume classifier with intensity normalisation inside the network."""

import torch
from torch import Tensor, nn


class NormalizeIntensity(nn.Module):
    def forward(self, volume: Tensor) -> Tensor:
        shift = volume.flatten(1).mean(1)
        scale = volume.flatten(1).std(1, unbiased=False)
        return (volume - shift[:, None, None, None, None]) / scale[:, None, None, None, None]


class VolumeClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = NormalizeIntensity()
        self.conv = nn.Conv3d(1, 4, 3)
        self.fc = nn.Linear(4, 2)

    def forward(self, volume: Tensor) -> Tensor:
        h = torch.relu(self.conv(self.transform(volume)))
        return self.fc(h.mean((2, 3, 4)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return VolumeClassifier()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    volume = torch.rand(5, 1, 6, 6, 6, generator=g)
    volume[0] = 0.0
    return (volume,)
