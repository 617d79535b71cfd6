"""`nanwatch compare A.parquet B.parquet`: what is matched and named from sketches and ranges alone, and what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    """Two layers around a step between them, which a fault may change, and a residual that B may hand on apart."""

    def __init__(self, step: Callable[[Tensor], Tensor] = torch.tanh, *, is_apart: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)
        self.step = step
        self.is_apart = is_apart

    def forward(self, x: Any) -> Any:
        x = x[0] + x[1] if isinstance(x, tuple) else x
        y = self.down(self.step(self.up(self.norm(x))))
        return (y, x) if self.is_apart else x + y


class Renamed(nn.Module):
    """Block with other names of its parts."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.pre, self.wide, self.narrow, self.step = block.norm, block.up, block.down, block.step

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.step(self.wide(self.pre(x))))


def blocks(number: int = 3, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(number)))


def faulty(model: nn.Sequential, plant: Callable[[Any], object]) -> nn.Sequential:
    found = copy.deepcopy(model)
    with torch.no_grad():
        plant(found[1])
    return found


def trace(path: Path, model: nn.Module, x: Tensor = X, **options: Any) -> Trace:
    with watch(model, trace=path, **{"sketches": 1, **options}), torch.no_grad():
        model(x)
    return Trace.open(path)


def compared(folder: Path, a: nn.Module, b: nn.Module, x: Tensor = X) -> Comparison:
    return compare_traces(trace(folder / "a.parquet", a), trace(folder / "b.parquet", b, x))


def scale(block: Block) -> None:
    block.down.weight[3] *= 1.5


def bend(block: Block) -> None:
    block.step = lambda x: torch.tanh(x) * (x < 1)


@pytest.mark.parametrize(
    ("plant", "first", "words"),
    [
        (scale, "1.down", "in it, or in the code that makes its input, of which a trace has the range alone"),
        (bend, "1.down", "in it, or in the code that makes its input"),
        (lambda block: block.norm.bias.add_(0.1), "1.norm", "in it, or"),
    ],
)
def test_the_first_module_is_named(
    plant: Callable[[Any], object], first: str, words: str, tmp_path: Path
) -> None:
    """A fault of the code before a layer is named with the layer, as inputs have no sketch."""
    model = blocks()
    found = compared(tmp_path, model, faulty(model, plant))
    assert found.equal is False
    assert found.first is not None
    assert found.first.module_a == first
    assert found.words("Where")[0].startswith(words)


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
