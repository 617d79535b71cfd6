"""A log in TensorBoard's event files, read back with TensorBoard's own EventAccumulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from support.toys import Scale, mlp

pytest.importorskip("tensorboard", reason="needs TensorBoard: pip install tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from support.watching import watch


def read(folder: Path) -> Any:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "histograms": 0, "scalars": 0})
    events.Reload()
    return events


def test_a_watch_logs_through_the_users_writer(tmp_path: Path) -> None:
    """A run until its fault: headroom of each module, then the flag 0, on disk before the error is raised."""
    writer = SummaryWriter(str(tmp_path), flush_secs=10_000)
    model = nn.Sequential(Scale(), Scale())
    with watch(model, sinks=writer, log_every=1000, forecast=False):
        model(torch.full((2,), 8.0, dtype=torch.float16))
        model[0].factor = float("inf")
        with pytest.raises(nanwatch.NonFiniteError):
            model(torch.ones(2, dtype=torch.float16))
        events = read(tmp_path)
        assert [(e.step, e.value) for e in events.Scalars("nanwatch/is_finite")] == [(0, 1.0), (1, 0.0)]
        (bits,) = events.Scalars("nanwatch_headroom_bits/0")
        assert bits.value == pytest.approx(torch.log2(torch.tensor(65504.0 / 8)).item())
        (words,) = events.Tensors("nanwatch/finding/text_summary")
        assert b"inf" in words.tensor_proto.string_val[0]
    writer.add_scalar("still/open", 1.0, 9)
    writer.close()
    assert "still/open" in read(tmp_path).Tags()["scalars"]


def test_a_folder_gets_a_writer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made with the first entry, closed by stop(); with several processes a folder each."""
    with watch(mlp(), sinks=tmp_path / "idle"):
        pass
    assert not (tmp_path / "idle").exists()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = mlp()
    with watch(model, sinks=f"tensorboard:{tmp_path / 'runs'}"):
        model(torch.ones(1, 3))
    assert [e.value for e in read(tmp_path / "runs-rank3").Scalars("nanwatch/is_finite")] == [1.0]
