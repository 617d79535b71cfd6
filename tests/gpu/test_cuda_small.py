"""Every way of reading on a GPU, small enough for compute-sanitizer: `make sanitize` runs this file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.numerics import _extension
from support.cuda_emulation import FORMATS, reference, same
from support.oracle import random_finite, random_patterns
from support.recorders import needs_cuda

pytestmark = needs_cuda


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_runs(dtype: torch.dtype) -> None:
    """Heads, bodies and tails of one block and of several, alone and many in a launch."""
    xs = [
        fill(dtype, (count,))[start:]
        for fill in (random_patterns, random_finite)
        for count, start in ((0, 0), (5, 0), (40_003, 0), (300_003, 1))
    ]
    expected = reference(xs)
    on_gpu = [x.cuda() for x in xs]
    assert same(_extension.abs_ranges(on_gpu), expected)
    assert same(torch.stack([_extension.abs_range(x) for x in on_gpu]), expected)
    many = (on_gpu * 65)[:514]
    assert same(_extension.abs_ranges(many), torch.cat([expected] * 65)[:514])


def test_a_watch() -> None:
    """Frames of finite, masked and failing tensors: rows in host memory, and what is examined more closely."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    with nanwatch.watch(model, on_nonfinite="record", rerun=False) as watch, torch.no_grad():
        for value in (1.0, float("inf"), float("nan"), -torch.finfo(torch.float32).max):
            x = torch.zeros(300, 64, device="cuda")
            x[7, 9] = value
            model(x)
    assert watch.report().finding is not None
