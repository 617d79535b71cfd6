"""The narrowest format for each module, from a trace that another process wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanwatch.trace.format_advice import FORMATS, fits, holdings

pytest.importorskip("pyarrow")


@pytest.mark.parametrize("compiled", ["0", "1"])
def test_one_small_element_does_not_decide(tmp_path: Path, compiled: str) -> None:
    """One weight of 10,000 below the smallest number of float16: it fits. Half of them, counted: it does not."""
    script = """
import sys, torch, nanwatch
net = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False))
with torch.no_grad():
    net[0].weight.uniform_(0.5, 1)
    net[0].weight.view(-1)[: int(sys.argv[2])] = 1e-9
with nanwatch.watch(net, trace=sys.argv[1], counts=sys.argv[3] == "counts"):
    net(torch.ones(1, 100))
"""
    for number, how, verdict, least, most in (
        (1, "counts", "fits", 1e-4, 1e-4),
        (5000, "counts", "becomes zero", 0.5, 0.5),
        (1, "", "fits", 1e-4, 1),
        (10_000, "", "becomes zero", 1, 1),
    ):
        path = tmp_path / f"{number}{how}.parquet"
        subprocess.run(
            [sys.executable, "-c", script, str(path), str(number), how],
            env=os.environ | {"NANWATCH_EXT": compiled}, check=True, timeout=120,
        )  # fmt: skip
        (weights,) = (one for one in holdings(path, "float16") if one.part == "weights")
        assert (weights.verdict, *weights.zero) == (verdict, pytest.approx(least), pytest.approx(most))
        (need,) = (one for one in fits(path) if one.part == "weights")
        assert (need.fits == "float16" or need.fits in FORMATS[:2]) == (verdict == "fits")
