"""`Trace(statistics=N)`: records, traces and the log have the statistics of each tensor in the batches that are due."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.records.record import Frame
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
