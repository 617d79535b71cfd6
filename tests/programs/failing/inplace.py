"""Writes into a tensor that somebody else still needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import Setup, failure


class PeakNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.div_(x.amax(dim=-1, keepdim=True))  # culprit: own_input


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 8)
        self.norm = PeakNorm()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.features(x))
        return self.head(h + self.norm(h))


# The record of an input is made when the call has returned. The re-run shows that the call wrote to its input.
@failure(module="norm", label="input[0]", operations="div_")
def own_input() -> Setup:
    """A module divides its own input in place, with a row of zeros."""
    model = Tagger()
    nn.init.constant_(model.features.bias, -0.3)
    x = torch.randn(6, 8)
    x[4] = 0.0
    return Setup(model, (x,))
