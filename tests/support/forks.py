"""A sum of two layers, to both of which its backward hands the same gradient, and what is seen of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanwatch.session.watch import Watch
from support.recorders import watched

SIDE = 64  # of what is counted: 16 KiB in float32
Hook = Callable[[Tensor], Any]


def doubles(g: Tensor) -> None:
    """Writes into a gradient, which others may have, too."""
    g.mul_(2)


class Fork(nn.Module):
    """The sum of two layers, each of which may have its gradient treated by a hook."""

    def __init__(self, *, first: Hook | None = None, second: Hook | None = None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(SIDE, SIDE, bias=bias), nn.Linear(SIDE, SIDE, bias=bias)
        self.hooks = [first, second]

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x), self.second(x)]
        for part, hook in zip(parts, self.hooks, strict=True):
            if hook is not None:
                part.register_hook(hook)
        return parts[0] + parts[1]


def batch() -> Tensor:
    """Rows of the width of a Fork."""
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def ranges(w: Watch) -> dict[str, tuple[float | None, float | None]]:
    """Return the ranges that the backward frames have of the gradient of each module's output."""
    return {
        frame.name: (record.abs_min, record.abs_max)
        for frame in w.frames
        if frame.phase == "backward"
        for record in frame.records
        if record.label == "output.grad"
    }


def range_of(x: Tensor) -> tuple[float, float]:
    """The range as torch computes it."""
    return x.abs().min().item(), x.abs().max().item()


def gained(w: Watch, step: Callable[[], Any]) -> dict[str, int]:
    """Return the increase of the counters in `step`."""
    before = w.counters
    step()
    return {name: count - before.get(name, 0) for name, count in w.counters.items()}


def fork_backward(
    recorder: str, model: Fork, gradient: Tensor, **options: Any
) -> tuple[Watch, dict[str, int]]:
    """A watched backward that begins with a gradient, and what it added to the counters."""
    with watched(model, recorder, gradients=True, max_frames=100, on_nonfinite="record", **options) as w:
        y = model(batch())
        return w, gained(w, lambda: y.backward(gradient))
