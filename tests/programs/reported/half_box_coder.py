"""Encoding of boxes against anchors in half precision."""

import torch
from torch import Tensor, nn

EPS = 1e-8


class BoxCoder(nn.Module):
    def forward(self, sizes: Tensor, anchors: Tensor) -> Tensor:
        anchors = anchors + EPS
        sizes = sizes + EPS
        return torch.log(sizes) - torch.log(anchors)  # culprit


class SizeHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.coder = BoxCoder()

    def forward(self, features: Tensor, sizes: Tensor, anchors: Tensor) -> Tensor:
        target = self.coder(sizes, anchors)
        return (self.fc(features) - target).abs().mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return SizeHead().half()


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.rand(5, 4, generator=g) + 0.1
    sizes[3, 1] = 0.0
    anchors = torch.rand(5, 4, generator=g) + 0.1
    return torch.randn(5, 6, generator=g).half(), sizes.half(), anchors.half()
