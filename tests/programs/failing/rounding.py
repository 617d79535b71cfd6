"""Values that vanish or are rounded in a 16-bit format, and would not in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import Setup, failure, sequence


class FastWeights(nn.Module):
    """One Adam step of inner-loop weights from a gradient that is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(width))
        self.register_buffer("m", torch.zeros(width))
        self.register_buffer("v", torch.zeros(width))

    def forward(self, grad: Tensor) -> Tensor:
        m = 0.9 * self.m + 0.1 * grad
        v = 0.999 * self.v + 0.001 * grad * grad
        denominator = v.sqrt() + 1e-8
        step = m / denominator  # culprit: adam_eps
        return self.start - 0.01 * step


@failure(
    "Adam's eps of 1e-8 is zero in float16, and so is the square of a small gradient",
    module="inner",
    value="nan+inf",
    operations="div",
    format_cause=True,
)
def adam_eps() -> Setup:
    model = sequence(inner=FastWeights(16))
    return Setup(model.half(), (torch.linspace(0, 1e-4, 16).half(),))


class Gumbel(nn.Module):
    """Gumbel noise on the logits."""

    def forward(self, logits: Tensor) -> Tensor:
        u = torch.rand_like(logits)
        noise = -torch.log(-torch.log(u))  # culprit: gumbel
        return logits + noise


@failure(
    "Gumbel noise of a random number that is exactly zero, which float16 draws once in 2048",
    module="noise",
    value="-inf",
    operations="log",
    format_cause=True,
)
def gumbel() -> Setup:
    model = sequence(logits=nn.Linear(8, 256), noise=Gumbel())
    return Setup(model.half(), (torch.randn(128, 8).half(),))


class Rounded(nn.Module):
    """Binary cross entropy of the negatives, by hand."""

    def forward(self, logits: Tensor) -> Tensor:
        p = torch.sigmoid(logits)
        return -torch.log(1 - p).mean()  # culprit: bfloat16_rounding


@failure(
    "a probability of 0.999 is rounded to 1 in bfloat16, and log(1 - p) is taken",
    module="loss",
    value="inf",
    operations="log",
    format_cause=True,
)
def bfloat16_rounding() -> Setup:
    model = sequence(score=nn.Linear(8, 1), loss=Rounded())
    nn.init.constant_(model.score.bias, 7.0)
    return Setup(model.bfloat16(), (torch.randn(16, 8).bfloat16(),))
