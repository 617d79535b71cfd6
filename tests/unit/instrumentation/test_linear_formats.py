"""Block formats of linear layers in a watch: their numbers, what is left alone, and where they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nanwatch
from nanwatch.instrumentation.linear_formats import _sample, measure_of
from nanwatch.numerics.block_formats import BLOCKS_BY_NAME
from nanwatch.trace.picture import draw
from nanwatch.trace.trace_file import Trace

ORIGINAL = functional.linear


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    assert functional.linear is ORIGINAL


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


X = torch.linspace(-2, 2, 16 * 64).sin().reshape(16, 64)


def test_the_numbers_are_those_of_would_fit() -> None:
    """Each operand of each product in each format, in the batches that are due; rows of the frame have them too."""
    net = model()
    with nanwatch.watch(net, formats=["mxfp8", "mxfp4"], formats_every=2) as watch:
        for _ in range(4):
            net(X)
        assert {one.batch for one in watch.formats} == {2}
        found = {(one.module, one.operand, one.format): one for one in watch.formats}
        records = [row for frame in watch.frames if frame.batch == 2 for row in frame.records]
    assert len(found) == 8
    inputs = {"0": X, "2": net[:2](X)}
    for (module, operand, form), one in found.items():
        x = inputs[module] if operand == "input" else net.get_submodule(module).weight
        fit = nanwatch.would_fit(x.detach(), form)
        assert isinstance(fit, nanwatch.BlockFit)
        assert one[4:7] == (fit.sqnr, fit.saturated, fit.flushed)
        rows = [row for row in records if row.label == f"{form} SQNR (dB) of {operand}"]
        assert pytest.approx(fit.sqnr) in [row.abs_max for row in rows]
    assert not any(
        measure_of(row.label) for frame in watch.frames if frame.batch == 3 for row in frame.records
    )
    sqnr = [one.sqnr for one in watch.formats]
    assert sqnr == sorted(sqnr)


def test_training_is_bit_equal() -> None:
    """Weights after steps with and without it are the same bits."""

    def trained(*, watched: bool) -> list[Tensor]:
        net = model()
        optimizer = torch.optim.Adam(net.parameters())
        watch = nanwatch.watch(net, formats="nvfp4", formats_every=1) if watched else None
        for _ in range(3):
            optimizer.zero_grad()
            net(X).square().mean().backward()
            optimizer.step()
        if watch is not None:
            assert len(watch.formats) == 4
            watch.stop()
        return [x.detach() for x in net.parameters()]

    assert all(map(torch.equal, trained(watched=True), trained(watched=False)))


class Integers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, torch.ones(2, x.shape[-1], dtype=x.dtype))


def test_an_operand_that_is_not_read_has_a_reason() -> None:
    """Integers have no block format. The call is made all the same."""
    net = Integers()
    with nanwatch.watch(net, formats="mxfp8") as watch:
        assert net(torch.ones(3, 4, dtype=torch.int64)).tolist() == [[4, 4]] * 3
        assert [(one.operand, one.reason) for one in watch.formats] == [
            ("input", "int64 is no floating-point dtype"),
            ("weight", "int64 is no floating-point dtype"),
        ]
        assert all(isnan(one.sqnr) for one in watch.formats)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.inner(x) + self.inner(X[:, :32] ** 9))


def test_of_several_calls_the_worst_counts_and_exclude_holds() -> None:
    """A layer that is called twice has the lower SQNR of both; one that is not watched has none."""
    net = Twice()
    both = [nanwatch.would_fit(x, "mxfp4") for x in (X[:, :32], X[:, :32] ** 9)]
    with nanwatch.watch(net, formats="mxfp4", exclude="other") as watch:
        net(X[:, :32])
    found = {(one.module, one.operand): one for one in watch.formats}
    assert found.keys() == {("inner", "input"), ("inner", "weight")}
    assert found["inner", "input"].sqnr == min(fit.sqnr for fit in both)  # type: ignore[union-attr]


@pytest.mark.parametrize(("form", "band"), [("mxfp8", 1), ("float8_block128x128", 128)])
def test_a_sample_is_whole_rows_over_all_of_the_tensor(form: str, band: int) -> None:
    """Bands as high as a block, the first row among them; the SQNR is that of the tensor to 0.3 dB."""
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    rows = _sample(x, BLOCKS_BY_NAME[form])
    places = (rows[:, :1] == x[:, 0]).int().argmax(1)
    assert torch.equal(rows, x[places])
    assert (len(rows), int(places[0])) == (256, 0)
    assert places[-1] >= 2048
    assert torch.equal(places[:band], torch.arange(band))
    whole, part = (nanwatch.would_fit(one, form) for one in (x, rows))
    assert part.sqnr == pytest.approx(whole.sqnr, abs=0.3)  # type: ignore[union-attr]


def test_sinks_and_the_picture_of_a_trace(tmp_path: Path) -> None:
    """Two tags for each layer, the least SQNR and largest share of each cell, and headroom that is as it was."""
    net, told = model(), dict[int, Any]()
    path = tmp_path / "run.parquet"
    with nanwatch.watch(
        net,
        formats="mxfp4",
        formats_every=1,
        trace=path,
        sinks=lambda values, batch: told.update({batch: values}),
        log_every=1,
    ) as watch:
        for _ in range(3):
            with torch.no_grad():
                net[2].weight[:, 0] *= 8
            net(X)
    picture = draw(Trace.open(path))
    sqnr, saturated = picture.formats["mxfp4"]
    assert sqnr.shape == saturated.shape == picture.bits.shape
    for i, name in enumerate(picture.modules):
        for batch, values in told.items():  # a sink that is slow is told of fewer
            tags = [values.get(f"nanwatch_mxfp4_{tag}/{name}", nan) for tag in ("sqnr_db", "saturated")]
            assert (sqnr[i, batch], saturated[i, batch]) == pytest.approx(tags, nan_ok=True)
        found = [one for one in watch.formats if one.module == name]
        if found:
            last = min(one.sqnr for one in found), max(one.saturated for one in found)
            assert (sqnr[i, -1], saturated[i, -1]) == pytest.approx(last)
    rows, place = {row.module: row.formats for row in picture.rows}, picture.modules.index("2")
    assert rows[""] == {}
    assert rows["2"]["mxfp4"] == pytest.approx((sqnr[place].min(), saturated[place].max()))
    assert float(picture.abs_max[picture.modules.index("2")].max()) == pytest.approx(
        float(net[2].weight.detach().abs().max())
    )
    pytest.importorskip("jinja2")
    assert "2 in mxfp4" in picture.to_html()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"formats": "mxfp9"}, ValueError, "no block format 'mxfp9'.*close names: mxfp"),
        ({"formats": 8}, TypeError, "a block format or several, such as 'mxfp8', got 8"),
        ({"formats_every": 5}, ValueError, "no effect without formats="),
        ({"formats": "mxfp8", "outputs": False}, ValueError, "no effect without outputs=True"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], words: str) -> None:
    """Errors say what came and what is accepted."""
    with pytest.raises(error, match=words):
        nanwatch.watch(model(), **options)  # type: ignore[arg-type]
