"""`nanwatch compare A.parquet B.parquet`: what is matched and named from sketches and ranges alone, and what is not."""

from __future__ import annotations

import copy
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.equivalence.comparison import Comparison
from nanwatch.equivalence.traces import compare_traces
from nanwatch.trace.trace_file import Trace
from support.written_traces import write_rows

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
    with nanwatch.watch(model, trace=path, **{"sketches": 1, **options}), torch.no_grad():
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
        (
            bend,
            "1",
            "in its own code, between the output of 1.up, which agrees, and the input of 1.down, which",
        ),
        (lambda block: block.norm.bias.add_(0.1), "1.norm", "in it, or"),
    ],
)
def test_the_first_module_is_named(
    plant: Callable[[Any], object], first: str, words: str, tmp_path: Path
) -> None:
    """A fault of a layer itself is named, and by the range of its input one of the code before it."""
    model = blocks()
    found = compared(tmp_path, model, faulty(model, plant))
    assert found.equal is False
    assert found.first is not None
    assert found.first.module_a == first
    assert found.where.startswith(words)
    assert len(found.first.tokens) == 8


def test_modules_of_other_names_are_matched(tmp_path: Path) -> None:
    """By the ranges of their weights, and containers by what they hold; the fault is in one of them."""
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


class Root(nn.Module):
    """RMS norm with a name of its own."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.mark.parametrize("eps", [1e-3, 5e-3, 5e-2])
def test_a_new_norm_with_another_eps_is_named(eps: float, tmp_path: Path) -> None:
    """Its weight of ones tells nothing, and its output is another, so it is matched by shape and neighbours."""
    x = X * torch.linspace(0.05, 1, 8)[:, None]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 32))
    other = nn.Sequential(OrderedDict(first=model[0], root=Root(eps), last=model[2]))
    one = trace(tmp_path / "a.parquet", model, x)
    found = compare_traces(one, trace(tmp_path / "b.parquet", other, x))
    assert found.first is not None
    assert (found.first.module_a, found.first.module_b) == ("1", "root")
    squares = model[0](x).square().mean(-1)
    scales = ((squares + 1e-6) / (squares + eps)).sqrt()
    told = re.fullmatch(r"a scale for each token, from (\S+) to (\S+): the eps .*", found.likely[0])
    assert told is not None, found.likely
    assert [float(one) for one in told.groups()] == pytest.approx(
        [float(scales.min()), float(scales.max())], rel=1e-3
    )
    other.root.eps = 1e-6
    assert compare_traces(one, trace(tmp_path / "c.parquet", other, x)).equal


class Placed(nn.Module):
    """Layer that is given positions too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.layer(x) + positions


class Caller(nn.Module):
    """Model whose own code may scale what the second layer is given."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), Placed()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.factor * self.first(x), torch.linspace(0, 1, 32))


def test_equal_positions_are_no_equal_input(tmp_path: Path) -> None:
    """The hidden state beside them differs already, so the fault is before the layer."""
    found = compared(tmp_path, Caller(), Caller(1.5))
    assert found.first is not None
    assert found.first.module_a == ""
    assert found.where.startswith(
        "in its own code, between the output of first, which agrees, and the input of"
    )


def test_hidden_and_residual_apart_are_compared_by_their_sum(tmp_path: Path) -> None:
    """The sum of two sketches is that of the sum. Without it nothing would be known of a block."""
    model, other = blocks(), blocks(is_apart=True)
    found = compared(tmp_path, nn.Sequential(model, nn.Identity()), nn.Sequential(other, Join()))
    assert found.equal
    errors = {one.module_a: one.error for one in found.modules}
    assert errors["0.1"] is not None
    assert errors["0.1"] < 1e-6


class Join(nn.Module):
    """Sum of hidden and residual."""

    def forward(self, x: Any) -> Tensor:
        return x[0] + x[1]


class Apart(nn.Module):
    """Three projections of one input, apart or in one layer."""

    def __init__(self, fused: nn.Linear | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Linear(32, width) for width in (32, 16, 16)]
        self.out = nn.Linear(64, 32)
        self.parts = nn.ModuleList(parts)
        self.is_fused = fused is not None
        if fused is not None:
            fused.weight = nn.Parameter(torch.cat([one.weight for one in parts]))
            fused.bias = nn.Parameter(torch.cat([one.bias for one in parts]))
            self.parts = nn.ModuleList([fused])

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([one(x) for one in self.parts], -1))


def test_a_fused_projection_is_matched_and_said_not_to_be_compared(tmp_path: Path) -> None:
    """A sketch depends on the place in the row, so those of q, k and v do not make up that of all."""
    found = compared(tmp_path, Apart(), Apart(nn.Linear(32, 64)))
    assert found.equal
    words = "parts.0, parts.1, parts.2 | parts.0 are matched by their weights and not compared"
    assert found.remarks[0].startswith(words)


class Mixed(nn.Module):
    """Three projections of one input and two of another, apart or fused."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        q, k, v, gate, up = (nn.Linear(32, width, bias=False) for width in (16, 16, 16, 32, 32))
        with torch.no_grad():  # v alone has the range of all, so v and gate look like q, k and v
            v.weight[0, :2] = torch.tensor([1.0, 1e-9])
        groups = [(q, k, v), (gate, up)]
        self.parts = nn.ModuleList(
            nn.ModuleList([self._fused(group)] if is_fused else group) for group in groups
        )

    def _fused(self, group: tuple[nn.Linear, ...]) -> nn.Linear:
        found = nn.Linear(32, sum(one.out_features for one in group), bias=False)
        found.weight = nn.Parameter(torch.cat([one.weight for one in group]))
        return found

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.parts, (x, x.tanh()), strict=True)
        return torch.cat([layer(given) for group, given in pairs for layer in group], -1)


def test_parts_of_a_fused_projection_have_one_input(tmp_path: Path) -> None:
    """Others whose weights have the same range are no parts of it."""
    found = compared(tmp_path, Mixed(is_fused=False), Mixed(is_fused=True))
    assert found.equal
    assert found.remarks[0].startswith("parts.0.0, parts.0.1, parts.0.2 | parts.0.0, and 1 more, are matched")


def test_an_error_that_grows_slowly_is_not_named(tmp_path: Path) -> None:
    """Without a measured floor rounding and a fault look alike, but for a jump. A third trace tells them apart."""
    model = blocks(12)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for i, block in enumerate(other):
            block.down.bias += 3e-8 * 3**i
    found = compared(tmp_path, model, other)
    assert (found.equal, found.first) == (None, None)
    assert "without a jump, as rounding does" in found.why
    assert "not measured" in found.floor
    precise = trace(tmp_path / "c.parquet", copy.deepcopy(model).double(), X.double())
    measured = compare_traces(Trace.open(tmp_path / "a.parquet"), Trace.open(tmp_path / "b.parquet"), precise)
    assert measured.equal is False
    assert measured.floor == f"rounding error of A, against {tmp_path / 'c.parquet'}"


def test_the_floor_of_a_finer_model_is_not_taken_for_that_of_a_coarser_one(tmp_path: Path) -> None:
    model = blocks()
    a = trace(tmp_path / "a.parquet", model)
    b = trace(tmp_path / "b.parquet", copy.deepcopy(model).bfloat16(), X.bfloat16())
    precise = trace(tmp_path / "c.parquet", copy.deepcopy(model).double(), X.double())
    assert compare_traces(a, b, precise).equal
    found = compare_traces(b, a, precise)
    assert found.equal
    assert found.floor.startswith("rounding error of A, against")


def test_a_part_of_a_model_is_compared_by_its_last_output(tmp_path: Path) -> None:
    """Where the watch includes no module that holds all others."""
    model = blocks()
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    models = model, faulty(model, scale)
    a, b = (trace(path, one, include=["*.up", "*.down"]) for path, one in zip(paths, models, strict=True))
    found = compare_traces(a, b)
    assert found.first is not None
    assert found.first.module_a == "1.down"


def test_whatever_stands_in_a_trace_is_compared_or_refused(tmp_path: Path) -> None:
    """A trace may be a stranger's: shapes, numbers, names and sketches that no run has written."""
    values: dict[str, list[Any]] = {
        "shape": ["[-1, 4]", f"[{10**24}, 3]", "[]", "[0, 0, 0]", "[2, 8, 31]", "nan", None],
        "dtype": ["load", "complex64", "", None],
        "abs_min": [nan, inf, -1.0, None],
        "abs_max": [nan, inf, 1e308, None],
        "module": ["", "..", "1", "1.norm.x", "\0"],
        "call": [0, -5, 2**62],
        "sketch": [b"", b"x" * 128, b"\xff" * 256, b"y" * 100, None],
        "role": ["weight", "output", "input"],
        "label": ["weight", "output[1]"],
    }
    a = trace(tmp_path / "a.parquet", blocks(2))
    rows, draw, refused = a.table().to_pylist(), random.Random(0), 0
    for number in range(150):
        changed = [dict(row) for row in rows]
        for name in draw.choices(list(values), k=3):
            draw.choice(changed)[name] = draw.choice(values[name])
        b = Trace.open(write_rows(tmp_path / f"{number}.parquet", changed))
        try:
            compare_traces(a, b).to_text()
        except ValueError:
            refused += 1
    assert 0 < refused < 75


def test_bad_use_is_explained(tmp_path: Path) -> None:
    a = trace(tmp_path / "a.parquet", blocks())
    with pytest.raises(
        ValueError, match=r"b.parquet has no sketches; record it with watch\(trace=..., sketches=N\)"
    ):
        compare_traces(a, trace(tmp_path / "b.parquet", blocks(), sketches=False))
    with pytest.raises(ValueError, match="has no call in batch 7"):
        compare_traces(a, a, batches=(0, 7))
    with pytest.raises(ValueError, match="factor should be above 1"):
        compare_traces(a, a, factor=1.0)
