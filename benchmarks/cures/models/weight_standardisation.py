"""A residual block with weight standardization; the last convolution starts at zero."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WSConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        std = weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False).sqrt() + 1e-5
        return F.conv2d(x, weight / std, self.bias, self.stride, self.padding)


class ResidualNet(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.body = nn.Sequential(WSConv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels))
        self.head = nn.Linear(channels, 2)
        nn.init.zeros_(self.body[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        h = h + self.body(h)
        return self.head(h.mean((2, 3)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return ResidualNet()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(2, 1, 6, 6, generator=g),)


def loss(output: Tensor) -> Tensor:
    return output.logsumexp(-1).mean()
