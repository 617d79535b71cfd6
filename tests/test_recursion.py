"""How deep calls may go: a watched call takes no more of the recursion limit than one with a forward hook."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from nanwatch import _extension
from nanwatch.watch import watch


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


@pytest.mark.skipif(_extension.C is None, reason="no compiled part")
def test_a_watched_call_takes_nothing_of_the_recursion_limit() -> None:
    """A forward goes as deep as unwatched, and deeper than with a hook."""
    plain = Recurses()
    unwatched = deepest(plain)
    with watch(plain, microscope=False, forecast=False):
        watched = deepest(plain)
    assert watched == unwatched > deepest(hooked())
