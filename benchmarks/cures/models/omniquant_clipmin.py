"""Learnable weight clipping for post-training quantisation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLIPMIN = 1e-5


class UniformAffineQuantizer(nn.Module):
    scale: Tensor

    def __init__(self, rows: int, bits: int = 4) -> None:
        super().__init__()
        self.qmax = 2**bits - 1
        self.upbound = nn.Parameter(torch.full((rows, 1), 4.0))

    def calibrate(self, w: Tensor) -> None:
        xmax = torch.sigmoid(self.upbound) * w.amax(-1, keepdim=True)
        scale = (xmax - w.amin(-1, keepdim=True)) / self.qmax
        self.scale = scale

    def forward(self, w: Tensor) -> Tensor:
        self.calibrate(w)
        q = w / self.scale
        q = (q.round() - q).detach() + q
        return q.clamp(-self.qmax, self.qmax) * self.scale


class QuantBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.quantizer = UniformAffineQuantizer(5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantizer(self.weight))


def make() -> nn.Module:
    torch.manual_seed(0)
    model = QuantBlock()
    with torch.no_grad():
        model.weight[3] = 0.0
    return model


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(3, 6, generator=g),)
