"""Models that compute more than their loss uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """Three branches, each of which is used, left out, or used without gradients, in turn."""

    def __init__(self, *uses: str) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.uses, self.calls, self.seen = uses, 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        total = torch.zeros(())
        for i, branch in enumerate(self.branches):
            use = self.uses[(i + self.calls) % len(self.uses)]
            if use == "not called":
                continue
            with torch.set_grad_enabled(use != "called without gradients"):
                y = branch(x)
            if use == "used":
                total = total + y
            elif use == "metric":
                with torch.no_grad():
                    self.seen += y.abs().max().item()
            elif use in ("detached", "called without gradients"):
                total = total + y.detach()
            elif use == "times zero":
                total = total + 0.0 * y
        self.calls += 1
        return self.head(x + total)


def whole(output: Tensor, step: int) -> Tensor:
    return (output - 1).square().mean()


class Case(NamedTuple):
    """A model, and the loss of what it returns."""

    make: Callable[[], nn.Module]
    loss_of: Callable[[Any, int], Tensor] = whole
    shape: tuple[int, ...] = (2, 4)

    def built(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make()
        with torch.no_grad():
            model(torch.ones(self.shape))  # what is lazy has its weights then
        if isinstance(model, Branches):
            model.calls = 0
        return model

    def batches(self) -> list[Tensor]:
        return [torch.randn(self.shape, generator=torch.Generator().manual_seed(i)) for i in range(5)]


def branch(*numbers: int) -> set[str]:
    return {f"branches.{i}.0.{label}" for i in numbers for label in ("weight", "bias")}
