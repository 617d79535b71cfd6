"""`nanwatch compare A.parquet B.parquet`: what is matched and named from sketches and ranges alone, and what is not."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch.compare.models import compare_traces
from nanwatch.trace.trace_file import Trace
from support.watching import watch

pytest.importorskip("pyarrow")

X = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))


def block(names: str, *parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(zip(names.split(), parts, strict=True)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    parts = ((nn.LayerNorm(32), nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(3))
    return nn.Sequential(*(block("norm up act down", *each) for each in parts))


def trace(path: Path, model: nn.Module) -> Trace:
    with watch(model, trace=path, sketches=1), torch.no_grad():
        model(X)
    return Trace.open(path)


def test_modules_of_other_names_are_matched(tmp_path: Path) -> None:
    """By order and class, and containers by what they hold; the fault is in one of them."""
    model = blocks()
    port = nn.Sequential(*(block("pre wide tanh narrow", *part) for part in copy.deepcopy(model)))
    a = trace(tmp_path / "a.parquet", model)
    names = [
        (each.module_a, each.module_b)
        for each in compare_traces(a, trace(tmp_path / "b.parquet", port)).modules
    ]
    assert ("2.norm", "2.pre") in names
    assert ("2.down", "2.narrow") in names
    assert len(names) == 16
    with torch.no_grad():
        port[1].narrow.bias[::2] += 0.1
    found = compare_traces(a, trace(tmp_path / "c.parquet", port))
    assert found.first is not None
    assert (found.first.module_a, found.first.module_b) == ("1.down", "1.narrow")
