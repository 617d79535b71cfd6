"""Iterative box refinement in the space before the sigmoid."""

import torch
from torch import Tensor, nn


class InverseSigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x / (1 - x))


class Refine(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.delta = nn.Linear(width, 4)
        self.inverse = InverseSigmoid()

    def forward(self, h: Tensor, reference: Tensor) -> Tensor:
        return self.delta(h) + self.inverse(reference)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 8)
        self.refine = Refine(8)
        self.boxes = nn.Linear(4, 4)

    def forward(self, features: Tensor, reference: Tensor) -> Tensor:
        return self.boxes(self.refine(torch.relu(self.query(features)), reference))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    reference = torch.rand(5, 4, generator=g) * 0.8 + 0.1
    reference[0, 2:] = torch.tensor([1.0, 0.0])
    return torch.randn(5, 6, generator=g), reference
