"""The narrowest format for each module, from a trace of a watched model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch.trace.format_advice import FORMATS, fits, holdings
from support.watching import watch

pytest.importorskip("pyarrow")


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize(
    ("number", "counts", "verdict", "least", "most"),
    [
        (1, True, "fits", 1e-4, 1e-4),
        (5000, True, "becomes zero", 0.5, 0.5),
        (1, False, "fits", 1e-4, 1),
        (10_000, False, "becomes zero", 1, 1),
    ],
)
def test_one_small_element_does_not_decide(
    tmp_path: Path, number: int, counts: bool, verdict: str, least: float, most: float
) -> None:
    """One weight of 10,000 below the smallest number of float16: it fits. Half of them, counted: it does not."""
    net = nn.Sequential(nn.Linear(100, 100, bias=False))
    with torch.no_grad():
        net[0].weight.uniform_(0.5, 1)
        net[0].weight.view(-1)[:number] = 1e-9
    path = tmp_path / "run.parquet"
    with watch(net, trace=path, counts=counts):
        net(torch.ones(1, 100))
    (weights,) = (one for one in holdings(path, "float16") if one.part == "weights")
    assert (weights.verdict, *weights.zero) == (verdict, pytest.approx(least), pytest.approx(most))
    (need,) = (one for one in fits(path) if one.part == "weights")
    assert (need.fits == "float16" or need.fits in FORMATS[:2]) == (verdict == "fits")
