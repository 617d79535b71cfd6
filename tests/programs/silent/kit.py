"""Registers of the trainings, and the loop, the data and the model that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Watching = Callable[..., AbstractContextManager[Any]]
mse = nn.functional.mse_loss
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


@dataclass(frozen=True)
class Fault:
    """A training that `train(watch, wrong)` makes right or wrong, the causes that may be named, and its ranks."""

    train: Callable[[Watching, bool], None]
    kinds: tuple[str, ...]
    ranks: int = 1


FAULTS: dict[str, Fault] = {}
UNUSUAL: dict[str, Callable[[Watching], None]] = {}


def fault(*kinds: str, ranks: int = 1) -> Callable[[Callable[[Watching, bool], None]], None]:
    """Enter a training under the name of its function, with the causes that a tool may give."""

    def enter(train: Callable[[Watching, bool], None]) -> None:
        FAULTS[train.__name__] = Fault(train, kinds, ranks)

    return enter


def unusual(train: Callable[[Watching], None]) -> None:
    """Enter a healthy training of unusual shape under the name of its function."""
    UNUSUAL[train.__name__] = train


def batches(steps: int = 12, inputs: int = 8, outputs: int = 4) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the number of a step, inputs, and the outputs of a fixed teacher."""
    generator = torch.Generator().manual_seed(3)
    teacher = torch.randn(inputs, outputs, generator=generator)
    for step in range(steps):
        x = torch.randn(16, inputs, generator=generator)
        yield step, x, torch.tanh(x @ teacher)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    call: Callable[[Tensor], Tensor] | None = None,
    *,
    steps: int = 12,
    inputs: int = 8,
    factor: float = 1.0,
    zero: Callable[[int], bool] = lambda step: True,
    before: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
) -> None:
    """Train as the books do. `zero` says whether to clear gradients; `before` and `after` surround the step."""
    for step, x, y in batches(steps, inputs):
        if zero(step):
            optimizer.zero_grad()
        (mse((model if call is None else call)(x), y) * factor).backward()
        before(step)
        optimizer.step()
        after(step)


@torch.no_grad()
def validate(model: nn.Module, steps: int = 2) -> None:
    """Call the model as a validation does, in whatever mode it is."""
    for _, x, y in batches(steps):
        mse(model(x), y).item()


class Layers(nn.Module):
    def __init__(self, norm: nn.Module | None = None, drop: float = 0.0) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(8, 16), norm or nn.LayerNorm(16)
        self.drop, self.head = nn.Dropout(drop), nn.Linear(16, 4)

    def features(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.norm(self.stem(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
