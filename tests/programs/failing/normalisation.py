"""Norms, distances, scales: what divides by a size or takes its root."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import Setup, failure, sequence


def after_linear(width: int, **last: nn.Module) -> nn.Sequential:
    """A linear layer, then the modules named."""
    return sequence(proj=nn.Linear(width, width, bias=False), **last)


class Standardise(nn.Module):
    """Zero mean, unit variance."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        var = (x - mean).square().mean(dim=-1, keepdim=True)
        inverse = torch.rsqrt(var)  # culprit: zero_variance
        return (x - mean) * inverse


@failure("rsqrt of the variance of a blank image, without eps", module="norm", operations="rsqrt")
def zero_variance() -> Setup:
    images = torch.rand(3, 16)
    images[1] = 0.0
    return Setup(after_linear(16, norm=Standardise()), (images,))


class Distances(nn.Module):
    """All distances between points by |a|² + |b|² - 2 a·b."""

    def forward(self, x: Tensor) -> Tensor:
        square = (x * x).sum(-1)
        squared = square[:, None] + square[None, :] - 2 * x @ x.T
        return squared.sqrt()  # culprit: pairwise_distance


@failure(
    "the distance of a point to itself, whose square comes out below zero",
    module="distances",
    operations="sqrt",
)
def pairwise_distance() -> Setup:
    return Setup(after_linear(16, distances=Distances()), (torch.randn(200, 16) + 5,))


class Angles(nn.Module):
    """The angle between each vector and its reference."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a = a / a.norm(dim=-1, keepdim=True)
        b = b / b.norm(dim=-1, keepdim=True)
        cosine = (a * b).sum(dim=-1)
        return torch.acos(cosine)  # culprit: acos_above_one


class Pose(nn.Module):
    """The error of predicted directions."""

    def __init__(self) -> None:
        super().__init__()
        self.predict = nn.Identity()
        self.angles = Angles()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.angles(self.predict(x), target).mean()


@failure("acos of a cosine that rounding put above 1", module="angles", operations="acos")
def acos_above_one() -> Setup:
    x = torch.randn(1000, 5)
    return Setup(Pose(), (x, x * 3))


class Cosine(nn.Module):
    """Cosine similarity by hand."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        lengths = a.norm(dim=-1) * b.norm(dim=-1)
        return (a * b).sum(dim=-1) / lengths  # culprit: cosine_of_zero


class Matcher(nn.Module):
    """Two texts, one encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8, bias=False)
        self.similarity = Cosine()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.similarity(torch.relu(self.encode(a)), torch.relu(self.encode(b)))


@failure("cosine similarity with a vector of zeros", module="similarity", operations="div")
def cosine_of_zero() -> Setup:
    b = torch.randn(4, 8)
    b[2] = 0.0
    return Setup(Matcher(), (torch.randn(4, 8), b))
