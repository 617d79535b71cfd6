"""The warnings of `on_nonfinite="warn"`: few, true, and at the user's own line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from support.gradient_models import Sick
from support.toys import Scale
from support.watching import watch

INF = float("inf")


@contextmanager
def told() -> Iterator[list[warnings.WarningMessage]]:
    """All warnings, as they come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.mark.usefixtures("each_recorder")
def test_runs_become_rarer_lines() -> None:
    """Of five runs the first, second and fourth have a line each, and the end has the sum."""
    model = nn.Sequential(Scale(), Scale(), Scale())
    with told() as caught, watch(model, on_nonfinite="warn") as w:
        # Places of the first faulty module; None is a good batch.
        for place in [None, 1, 0, None, 2, None, 2, None, 2, None, 2, None]:
            for number, module in enumerate(model):
                module.factor = INF if number == place else 1.0
            model(torch.ones(1))
        w.stop()
    assert [str(warning.message).partition("; Watch.report")[0] for warning in caught] == [
        "inf first seen in `output` of 1 (Scale) in batch 1",
        "inf first seen in `output` of 2 (Scale) in batch 4",
        "inf first seen in `output` of 2 (Scale) in batch 8",
        "non-finite batches: 6 of 12, first in '2' 4x, '1' 1x, '0' 1x",
    ]
    assert {warning.category for warning in caught} == {RuntimeWarning}


@pytest.mark.usefixtures("each_recorder")
def test_bad_backwards_in_a_row_are_one_run() -> None:
    """The forwards between them are finite, and end no run."""
    model = nn.Sequential(Sick())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with told() as caught, watch(model, on_nonfinite="warn", gradients=True):
        for _ in range(3):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            nn.init.zeros_(model[0].weight)
            optimizer.zero_grad()
    begins, total = (str(warning.message) for warning in caught)
    assert " in the backward of batch 0; " in begins
    assert total == "non-finite batches: 3 of 3, first in '0' 3x"
