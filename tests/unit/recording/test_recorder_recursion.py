"""How deep calls may go: a watched call takes no more of the recursion limit than one with a forward hook."""

from __future__ import annotations

import sys

import torch
from torch import nn

from nanwatch.numerics import _extension
from nanwatch.session.api import watch


class Recurses(nn.Module):
    """Calls itself as often as it is told to."""

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        found: torch.Tensor = self(x, times - 1) if times else x
        return found


def deepest(model: nn.Module) -> int:
    """How often the model may call itself before the interpreter's limit."""
    low, high = 0, sys.getrecursionlimit()
    while low < high:
        middle = (low + high + 1) // 2
        try:
            model(torch.ones(1), middle)
            low = middle
        except RecursionError:
            high = middle - 1
    return low


def hooked() -> nn.Module:
    """With a hook that does nothing."""
    model = Recurses()
    model.register_forward_hook(lambda *_: None)
    return model


def test_a_watched_call_takes_no_more_of_the_recursion_limit_than_a_hook() -> None:
    """A forward goes as deep as with a hook; with the compiled part as deep as unwatched."""
    plain = Recurses()
    unwatched = deepest(plain)
    with watch(plain, rerun=False, forecast=False):
        watched = deepest(plain)
    hooks = deepest(hooked())
    # A call costs what a hook costs. The innermost one reads its tensors, for which a few frames must be left.
    assert hooks - 1 <= watched <= unwatched
    assert _extension.C is None or watched == unwatched > hooks
