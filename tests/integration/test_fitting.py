"""The narrowest format for each module, from a trace of a watched model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.trace.fits import fits

pytest.importorskip("pyarrow")


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize(
    ("least", "most", "verdict", "narrowest"),
    [
        (1e-9, 1.0, "fits", "float8_e5m2"),
        (1e-9, 1e-6, "becomes zero", "bfloat16"),
        (0.5, 40000.0, "no room", "bfloat16"),
        (0.5, 70000.0, "overflows", "bfloat16"),
        (0.5, torch.nan, "not finite", None),
    ],
)
def test_the_verdict_on_float16(
    tmp_path: Path, least: float, most: float, verdict: str, narrowest: str | None
) -> None:
    """An element that becomes zero matters beside the largest of its tensor alone."""
    net = nn.Sequential(nn.Linear(2, 1, bias=False))
    net[0].weight.data = torch.tensor([[least, most]])
    path = tmp_path / "run.parquet"
    with watch(net, trace=path, on_nonfinite="record", rerun=False):
        net(torch.ones(1, 2))
    (weights,) = (need for need in fits(path) if need.part == "weights")
    assert (weights.verdicts["float16"], weights.fits) == (verdict, narrowest)
