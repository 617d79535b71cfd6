"""Quantisation-aware training with groups of weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GroupQuantiser(nn.Module):
    def __init__(self, bits: int = 4, group: int = 4) -> None:
        super().__init__()
        self.maxq, self.group = 2**bits - 1, group

    def forward(self, weight: Tensor) -> Tensor:
        w = weight.reshape(-1, self.group)
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
        scale = (high - low) / self.maxq
        q = (w - low) / scale  # culprit
        q = q + (q.round() - q).detach()
        return (q * scale + low).view_as(weight)


class QuantLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.quantise = GroupQuantiser()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantise(self.weight), self.bias)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = QuantLinear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Expert()
    with torch.no_grad():
        model.layer.weight[2] = 0.0
    return model


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(3, 8, generator=g),)
