"""Tensors with scales as a record shows them: stand-ins with the attributes of their libraries, and packed pairs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import nanwatch
from nanwatch.numerics.formats import Scaling, limits
from nanwatch.numerics.scaled import read_scaled, unpacked
from nanwatch.recording.observe import observe, read
from nanwatch.records.headroom import headroom_bits
from nanwatch.report.report import Report
from nanwatch.trace.picture import draw
from support.block_values import values_in
from support.scaled import engine_float8, engine_mxfp8, wrapper


def test_the_range_is_that_of_the_scaled_values() -> None:
    """In the dtype that the tensor shows, whose ends the values have."""
    x = torch.tensor([[0.5, 3.0], [-1.0, 0.25]])
    row = observe(engine_float8(x, scale=64.0), "weight", "weight")
    assert (row.abs_min, row.abs_max, row.isfinite) == (0.25, 3.0, True)
    assert (row.shape, row.dtype) == ((2, 2), "bfloat16")
    assert read(engine_float8(x, scale=64.0), "weight", "weight") == row


def test_blocks_are_read_past_the_padding_of_their_scales() -> None:
    """The padding of TransformerEngine's scales is nan here, and no value is."""
    x = torch.randn(5, 96) * torch.logspace(-3, 3, 5)[:, None]
    found = read_scaled(engine_mxfp8(x))
    assert found is not None
    assert torch.equal(found.values, values_in(x, "mxfp8"))


def test_a_nan_scale_makes_values_nan() -> None:
    """They are counted, with the index of the first."""
    x = torch.ones(2, 64)
    x[1, 40] = torch.nan
    row = observe(engine_mxfp8(x), "output", "output")
    assert row.is_fault
    assert row.health is not None
    assert (row.health.num_nan, row.health.first_nonfinite) == (32, (1, 32))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no packed float4")
def test_packed_pairs_are_numbers() -> None:
    """The first of a pair is in the low half of its byte. The shape is that of the bytes."""
    pairs = torch.tensor([[0x10, 0xF2], [0x7F, 0x85]], dtype=torch.uint8)
    assert unpacked(pairs).tolist() == [[0.0, 0.5, 1.0, -6.0], [-6.0, 6.0, 3.0, -0.0]]
    row = observe(pairs.view(torch.float4_e2m1fn_x2), "buffer", "buffer")
    assert (row.shape, row.dtype, row.abs_min, row.abs_max) == ((2, 2), "float4_e2m1fn_x2", 0.0, 6.0)
    assert headroom_bits(row) is None  # its scales are not known


@pytest.mark.parametrize(
    "x",
    [
        wrapper("someone", "Float8Tensor", (2, 2)),
        wrapper("torchao", "Float8Tensor", (2, 2)),
        wrapper("transformer_engine", "MXFP8Tensor", (2, 2), _rowwise_data=None),
    ],
    ids=["another library", "other attributes", "columnwise alone"],
)
def test_what_is_not_known_is_not_checked(x: torch.Tensor) -> None:
    """With the reason, and without an error in the user's run."""
    row = observe(x, "weight", "weight")
    assert row.isfinite is None
    assert row.note is not None
    assert row.note.kind == "not_checked"
    assert "cannot read a" in row.note.text, row.note.text


@pytest.mark.parametrize("scale", [64.0, 3.0, 1e-3, 200.0])
def test_the_ends_are_those_of_the_elements_times_the_scale(scale: float) -> None:
    """As float64 has them, over every number that the bytes could be."""
    x = torch.tensor([[0.5, 2.0], [-1.0, 0.25]])
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double() * float(
        torch.tensor([1 / scale])
    )
    held = every[every > 0]
    row = observe(engine_float8(x, scale), "weight", "weight")
    assert row.ends is not None
    assert row.ends.largest == pytest.approx(held.max().item(), rel=1e-15)
    assert row.ends.smallest_subnormal == pytest.approx(held.min().item(), rel=1e-15)
    assert row.abs_max is not None
    assert headroom_bits(row) == pytest.approx(math.log2(held.max().item() / row.abs_max), abs=1e-6)
    assert row.format.startswith("float8_e4m3fn x ")


def test_shares_and_scales() -> None:
    """Three of eight elements at the end, two zero. Of blocks, the scales of both."""
    x = torch.tensor([[448.0, -500.0, 448.0, 1.0], [2.0, 0.0, 1e-9, 3.0]])
    scaling = observe(engine_float8(x.clamp(-448, 448), 1.0), "weight", "weight").scaling
    assert scaling == Scaling("float8_e4m3fn", 1.0, 1.0, 1.0, 3 / 8, 2 / 8)
    blocks = torch.cat([torch.full((1, 32), 3.0), torch.full((1, 32), 2.0**-20)], 1)
    row = observe(engine_mxfp8(blocks), "weight", "weight")
    assert row.scaling == Scaling("float8_e4m3fn", None, 2.0**-28, 2.0**-7, 0.0, 0.0)
    assert row.ends == limits("bfloat16")


class Holder(torch.nn.Module):
    """A module that returns what it was given."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.given


def test_a_watch_sees_them() -> None:
    """The frame of a module has a record of its scaled output, with the value."""
    model = Holder(engine_float8(torch.tensor([2.0, 6.0]), scale=64.0))
    with nanwatch.watch(model, on_nonfinite="record") as watch:
        model(torch.ones(2))
    record = watch.frames[-1].records[-1]
    assert (record.dtype, record.abs_max) == ("bfloat16", 6.0)


def test_a_trace_has_their_ends(tmp_path: Path) -> None:
    """Its frames are those of the watch, and its picture has the headroom of the scaled output."""
    path = tmp_path / "run.parquet"
    model = Holder(engine_float8(torch.tensor([2.0, 6.0]), scale=64.0))
    with nanwatch.watch(model, trace=path) as watch:
        model(torch.ones(2))
    trace = nanwatch.Trace.open(path)
    assert trace.frames(0) == watch.frames
    assert draw(trace).bits.tolist() == [[pytest.approx(math.log2(448 / 64 / 6))]]
    assert "float8_e4m3fn x 0.0156" in watch.report().to_html()
    assert Report.from_json(watch.report().to_json()) == watch.report()
