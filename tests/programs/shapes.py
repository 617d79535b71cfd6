"""Where a failure begins: in code between modules, in weights that no call shows, in two operations at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import PRODUCTS, Setup, failure


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.log(x)  # culprit: given_to_a_nested_container
        return self.block(h).sum(-1)


@failure(module="", label="", value="inf", operations="log")
def given_to_a_nested_container() -> Setup:
    """The logarithm of a count of zero is taken."""
    return Setup(Scores(), (torch.tensor([[0.0, 1.0, 2.0, 5.0]]),))


class Gated(nn.Module):
    def __init__(self, gate: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((1,), gate))
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x) * self.gate)


@failure(module="", label="gate", origin="weight")
def parameter_of_a_parent() -> Setup:
    """A parameter of a parent is nan."""
    return Setup(Gated(float("nan")), (torch.randn(2, 4),))


class TwoLogarithms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        probs = torch.softmax(self.net(x), dim=1)
        entropy = -(probs * torch.log(probs)).sum(1)  # culprit: two_logarithms
        return F.nll_loss(torch.log(probs), y) - 0.01 * entropy.mean()


@failure(module="", label="", operations="log")
def two_logarithms() -> Setup:
    """Two logarithms of one probability of zero are taken."""
    x = torch.randn(8, 6)
    x[2] *= 2000
    return Setup(TwoLogarithms(), (x, torch.randint(0, 10, (8,))), loss=lambda output: output)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.softmax(q @ k.mT)  # culprit: scores_that_overflow


@failure(module="", label="", value="inf", operations=PRODUCTS)
def scores_that_overflow() -> Setup:
    """Scores leave float16, and look like a mask."""
    q, k = torch.full((2, 8), 100.0), torch.full((2, 8), -100.0)
    k[0] = 0
    return Setup(Products().half(), (q.half(), k.half()))
