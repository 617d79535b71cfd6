"""`Trace(statistics=N)`: records, traces and the log have the statistics of each tensor in the batches that are due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.records.record import Frame
from support import watching
from support.recorders import WITH_DEVICE, watched


class Spread(nn.Module):
    """Returns numbers, whole and complex ones, none, and its argument changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 7))

    def forward(self, x: Tensor) -> Any:
        y = x @ self.weight
        return y, y.T, y.long(), torch.complex(y, y), y[:0], y.relu()


def by_label(frames: tuple[Frame, ...], batch: int) -> dict[str, Any]:
    return {one.label: one for frame in frames if frame.batch == batch for one in frame.records}


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_records_of_the_batches_that_are_due(recorder: str) -> None:
    """Each real tensor has them there, and none in the other batches; the ranges are the same."""
    model, x = Spread(), torch.randn(64, 300)
    with watched(model, recorder, statistics=2, max_frames=50) as watch:
        for _ in range(3):
            output = model(x)
    for batch in (0, 2):
        records = by_label(watch.frames, batch)
        given = {"weight": model.weight, "input[0]": x} | {
            f"output[{i}]": one for i, one in enumerate(output)
        }
        for label, tensor in given.items():
            found = records[label].statistics
            if tensor.is_complex() or not tensor.numel():
                assert found is None
            else:
                assert found == pytest.approx(nanwatch.statistics(tensor))
            assert (records[label].abs_min, records[label].abs_max) == nanwatch.abs_range(tensor)[:2]
    assert all(one.statistics is None for one in by_label(watch.frames, 1).values())


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_gradients(recorder: str) -> None:
    """Those of a batch that is due have them too."""
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU())
    with watched(model, recorder, gradients=True, statistics=2, max_frames=50) as watch:
        gradients = []
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(9, 30)).square().sum().backward()
            gradients.append(model[0].weight.grad)
    frames = [one for one in watch.frames if one.phase == "backward"]
    assert by_label(tuple(frames), 0)["weight.grad"].statistics == pytest.approx(
        nanwatch.statistics(gradients[0])
    )
    assert all(one.statistics is None for one in by_label(tuple(frames), 1).values())


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_failure_has_none_for_what_is_not_finite(recorder: str) -> None:
    """A report with them goes through JSON and back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with watched(model, recorder, statistics=True) as watch, pytest.raises(nanwatch.NonFiniteError):
        model(torch.tensor([[1.0, 2.0, torch.nan, 0.0]]))
    report = watch.report()
    records = by_label(report.frames, 0)
    assert records["input[0]"].statistics is None
    assert records["weight"].statistics is not None
    assert nanwatch.Report.from_json(report.to_json()).to_json() == report.to_json()


def test_traces_and_the_log(tmp_path: Path) -> None:
    """A trace has four columns, from which the records come back. The log has a curve for each module."""
    pytest.importorskip("pyarrow")
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU())
    outputs: list[Tensor] = []
    logged: dict[int, dict[str, float]] = {}

    def log(scalars: dict[str, float], batch: int) -> None:
        logged[batch] = scalars

    options: Any = {"trace": tmp_path / "run.parquet", "sinks": log, "log_every": 1}
    with watching.watch(model, statistics=2, max_frames=50, **options) as watch:
        for _ in range(3):
            outputs.append(model(torch.randn(9, 30)))
    trace = nanwatch.Trace.open(tmp_path / "run.parquet")
    for batch in (0, 1, 2):
        assert trace.frames(batch) == tuple(one for one in watch.frames if one.batch == batch)
    assert trace.table(["rms"], [1])["rms"].null_count == trace.table(["rms"], [1]).num_rows
    for batch, scalars in logged.items():  # a batch that follows too fast has no entry
        found = {
            name: value for name, value in scalars.items() if name.endswith("/1") and "headroom" not in name
        }
        expected = nanwatch.statistics(outputs[batch])._asdict() if batch != 1 else {}
        assert found == pytest.approx({f"nanwatch_{name}/1": value for name, value in expected.items()})
    assert 0 in logged
