"""Several real steps of training until one fails."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from programs.case import Setup, failure


class Regressor(nn.Module):
    """Two layers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, inner)
        self.out = nn.Linear(inner, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.hidden(x)))


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
    """Plain training on one batch."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).squeeze(-1), y)
        loss.backward()
        optimizer.step()


@failure(
    "a learning rate that is too high: the step makes the weights nan before an output is",
    module="hidden",
    label="weight",
    origin="weight",
)
def weights_diverge() -> Setup:
    model = Regressor(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    x = 10 * torch.randn(32, 8)
    return Setup(model, loop=lambda: fit(model, optimizer, x, x.sum(-1), 20))


@failure(
    "Adam on float16 weights: its eps of 1e-8 and the squares of small gradients are zero",
    module="hidden",
    label="weight",
    origin="weight",
    value="inf",
)
def adam_in_float16() -> Setup:
    model = Regressor(8, 16).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = 0.1 * torch.randn(32, 8).half()
    y = model(x).detach().squeeze(-1) + 0.3
    return Setup(model, loop=lambda: fit(model, optimizer, x, y, 5))
