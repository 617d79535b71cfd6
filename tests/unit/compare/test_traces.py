"""`nanwatch compare A.parquet B.parquet`: what is matched and named from sketches and ranges alone, and what is not."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nanwatch.compare.traces import compare_traces
from nanwatch.trace.result import Comparison
from nanwatch.trace.trace_file import Trace
from support.watching import watch

pytest.importorskip("pyarrow")

X = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Two layers behind a norm, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Renamed(nn.Module):
    """Block with other names of its parts."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.pre, self.wide, self.narrow = block.norm, block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.pre(x))))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


def trace(path: Path, model: nn.Module) -> Trace:
    with watch(model, trace=path, sketches=1), torch.no_grad():
        model(X)
    return Trace.open(path)


def compared(folder: Path, a: nn.Module, b: nn.Module) -> Comparison:
    return compare_traces(trace(folder / "a.parquet", a), trace(folder / "b.parquet", b))


def test_modules_of_other_names_are_matched(tmp_path: Path) -> None:
    """By order and class, and containers by what they hold; the fault is in one of them."""
    model = blocks()
    port = nn.Sequential(*(Renamed(copy.deepcopy(one)) for one in model))
    names = [(one.module_a, one.module_b) for one in compared(tmp_path, model, port).modules]
    assert ("2.norm", "2.pre") in names
    assert ("2.down", "2.narrow") in names
    assert len(names) == 13
    with torch.no_grad():
        port[1].narrow.bias += 0.1
    found = compare_traces(Trace.open(tmp_path / "a.parquet"), trace(tmp_path / "c.parquet", port))
    assert found.first is not None
    assert (found.first.module_a, found.first.module_b) == ("1.down", "1.narrow")
