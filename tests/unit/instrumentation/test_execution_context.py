"""Snapshots of random states and autocast."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nanwatch.instrumentation.execution_context import Autocast, RngState


@pytest.mark.parametrize("others", [False, True])
def test_random_numbers_come_again(others: bool) -> None:
    """Those of torch always, those of random and numpy where they were asked for."""

    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    before = RngState.capture(others=True)
    try:
        state = RngState.capture(others=others)
        first = drawn()
        state.restore()
        again = drawn()
        assert [a == b for a, b in zip(first, again, strict=True)] == [True, others, others]
    finally:
        before.restore()


def test_autocast_is_as_it_was_captured() -> None:
    """Its dtype, and that it was off; afterwards the state around it is back."""
    with torch.autocast("cpu", torch.float16):
        inside = Autocast.capture()[0]
    outside = Autocast.capture()[0]
    assert (inside.dtype, inside.enabled, outside.enabled) == (torch.float16, True, False)
    x = torch.ones(2, 2)
    with inside.context():
        assert (x @ x).dtype is torch.float16
        with outside.context():
            assert (x @ x).dtype is torch.float32
    assert (x @ x).dtype is torch.float32
