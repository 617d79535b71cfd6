"""`measured`: the worst of each operand over a trace is that of would_fit on each batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nanwatch
from nanwatch.numerics.fit import would_fit
from nanwatch.trace.measured_formats import measured

pytest.importorskip("pyarrow")


@pytest.mark.parametrize("every", [1, 2])
def test_the_worst_batch_counts(tmp_path: Path, every: int) -> None:
    """The numbers are those that `would_fit` has for the layer's inputs and weight."""
    model = torch.nn.Linear(64, 8)
    inputs = [torch.randn(16, 64) * torch.logspace(0, -i, 64) for i in range(4)]
    file = tmp_path / "run.parquet"
    with nanwatch.watch(model, trace=file, formats=["mxfp4", "nvfp4"], formats_every=every):
        for x in inputs:
            model(x)
    fits = [would_fit(x, "nvfp4") for x in inputs[::every]]
    found = {one.operand: one for one in measured(file, ["nvfp4"])}
    worst = min(range(len(fits)), key=lambda i: fits[i].sqnr)
    assert found["input"][:3] == ("", "input", "nvfp4")
    assert found["input"].sqnr == pytest.approx(fits[worst].sqnr, rel=1e-5)
    assert found["input"].batch == worst * every
    assert found["input"].saturated == pytest.approx(max(one.saturated for one in fits), rel=1e-5)
    assert found["input"].flushed == pytest.approx(max(one.flushed for one in fits), rel=1e-5)
    assert found["input"].num_batches == len(fits)
    assert found["weight"].sqnr == pytest.approx(would_fit(model.weight, "nvfp4").sqnr, rel=1e-5)


def test_what_was_not_measured_is_refused(tmp_path: Path) -> None:
    """With what the trace has, and how to measure the rest."""
    file = tmp_path / "run.parquet"
    model = torch.nn.Linear(64, 8)
    with nanwatch.watch(model, trace=file, formats="mxfp8"):
        model(torch.ones(2, 64))
    with pytest.raises(ValueError, match=r"what nvfp4 would lose; it has mxfp8\. .* --formats mxfp8,nvfp4"):
        measured(file, ["mxfp8", "nvfp4"])
    with pytest.raises(ValueError, match="got the format 'fp9'; accepted are mxfp8"):
        measured(file, ["fp9"])
