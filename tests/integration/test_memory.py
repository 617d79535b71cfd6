"""The memory that watching takes from torch's allocator: nothing but copies of the random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.numerics import _extension
from support.allocated import allocated
from support.sized_models import gpt2, llama, resnet
from support.watching import watch

ROOM = 16 * 1024  # for copies of the state of the random numbers, 5,056 bytes each
# The fallback reads with PyTorch's operations, whose results lie in PyTorch's memory while they are needed: 3.6 MB.
READING = 0 if _extension.C is not None else 4 * 2**20
# Counts by power of two are read with them everywhere.
COUNTING = 2**19


def peak_of(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], watched: bool, **options: Any
) -> tuple[int, int]:
    """Return the peak of two training steps, after a first one that made the optimizer's state."""
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watcher = watch(model, **options) if watched else None

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps() -> None:
        step()
        step()

    step()
    found = allocated(steps)
    if watcher is not None:
        assert watcher.batch == 2
        watcher.stop()
    return found


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"gradients": True, "counts": True}, marks=pytest.mark.slow)],
    ids=["default", "all"],
)
@pytest.mark.parametrize(
    "make", [gpt2, pytest.param(llama, marks=pytest.mark.slow), pytest.param(resnet, marks=pytest.mark.slow)]
)
def test_the_peak_of_what_torch_allocates_is_the_same(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], options: dict[str, Any]
) -> None:
    """Forward, backward and step of models of tens of megabytes: the random state is all that comes on top.

    Counts, which are for a few batches, take up to half a mebibyte while they are made.
    """
    reading = max(READING, COUNTING if "counts" in options else 0)
    plain, watched = peak_of(make, watched=False), peak_of(make, watched=True, **options)
    assert plain[0] > 20 * 2**20
    assert abs(watched[0] - plain[0]) <= ROOM + reading
    assert watched[0] <= 1.01 * plain[0] + reading
    assert watched[1] - plain[1] <= ROOM
