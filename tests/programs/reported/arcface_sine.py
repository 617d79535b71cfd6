"""Face recognition with an additive angular margin."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ArcMarginProduct(nn.Module):
    def __init__(self, width: int, classes: int, s: float = 30.0, m: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.cos_m, self.sin_m = s, math.cos(m), math.sin(m)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(0, 1))  # culprit
        phi = cosine * self.cos_m - sine * self.sin_m
        target = F.one_hot(label, cosine.shape[1]).bool()
        return self.s * torch.where(target, phi, cosine)


class FaceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.margin = ArcMarginProduct(4, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.margin(self.embed(x), label), label)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = FaceNet()
    nn.init.eye_(model.embed.weight)
    with torch.no_grad():
        model.margin.weight[1] = torch.tensor([0.0, 2.0, 0.0, 0.0])
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 4, generator=g)
    x[2] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    return x, torch.tensor([0, 2, 1])


def loss(output: Tensor) -> Tensor:
    return output
