"""Messages: what an event says, as lines of a file and in a logger."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.monitoring.forecast import Forecast
from nanwatch.monitoring.messages import JsonLinesSink, Message, MessageSink
from nanwatch.monitoring.sink_thread import _finish_all
from nanwatch.report.spike import Departure, SpikeReport
from support.toys import Scale


class Kept(MessageSink):
    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


def test_a_failure_has_its_reason_its_line_and_its_folder(tmp_path: Path) -> None:
    """In words and as facts."""
    kept = Kept()
    with nanwatch.watch(
        model := nn.Sequential(Log()), sinks=kept, output_dir=tmp_path, on_nonfinite="record"
    ):
        model(torch.ones(1))
    with (
        pytest.raises(nanwatch.NonFiniteError),
        nanwatch.watch(model, sinks=kept, output_dir=tmp_path),
    ):
        model(torch.zeros(1))
    (message,) = kept.messages
    assert message.text.startswith(
        "inf first seen in `output` of 0 (Log) in batch 0. Why: this module made it"
    )
    assert (message.event, message.level, message.batch, message.rank) == ("failure", logging.ERROR, 0, 0)
    line = Log.forward.__code__.co_firstlineno + 1
    assert message.facts == {
        "module": "0",
        "reason": "made-by-the-module",
        "place": f"{__file__}:{line}",
        "value": "inf",
        "origin": "produced",
        "phase": "forward",
        "folder": str(tmp_path / "batch-0"),
    }


def test_spikes_forecasts_and_skipped_steps_are_messages() -> None:
    """Each at its level."""
    kept = Kept()
    kept.on_spike(SpikeReport(4, 1, (Departure("", "loss", 9.1, 2.4, 55.0),), "loss"))
    kept.on_forecast(7, Forecast("a", "output", "float16", 2.0, 1.0, 90, 5))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with nanwatch.watch(model, sinks=kept, gradients=True, scaler=scaler):
        scaler.scale(model(torch.ones(1, 2)).sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    told = [(one.event, logging.getLevelName(one.level), one.batch) for one in kept.messages]
    assert told == [("spike", "WARNING", 4), ("forecast", "WARNING", 7), ("skipped_step", "INFO", 0)]
    assert [one.text.partition(":")[0] for one in kept.messages] == [
        "spike in batch 4",
        "`output` of a",
        "skipped step (scale 4 → 2)",
    ]
    assert kept.messages[1].facts["expected_batch"] == 90


def test_a_file_gets_a_line_for_each_event(tmp_path: Path) -> None:
    """With the headroom of batches; a later watch goes on in the same file."""
    file = tmp_path / "made" / "run.jsonl"
    model = nn.Sequential(Scale(2.0))
    for factor in (2.0, float("inf")):
        with nanwatch.watch(model, sinks=f"jsonl:{file}", log_every=1, on_nonfinite="record"):
            model[0].factor = factor
            model(torch.ones(2, dtype=torch.float16))
        _finish_all()
    batch, failure = map(json.loads, file.read_text().splitlines())
    assert (batch["event"], batch["nanwatch_headroom_bits/0"]) == ("batch", pytest.approx(15.0, abs=0.01))
    assert (failure["event"], failure["facts"]["module"]) == ("failure", "0")


def test_each_process_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a trace."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    sink = JsonLinesSink(str(tmp_path / "run.jsonl"))
    sink.send(Message("spike", 1, "words"))
    sink.on_close()
    assert os.listdir(tmp_path) == ["run-rank3.jsonl"]


def test_a_logger_gets_records(caplog: pytest.LogCaptureFixture) -> None:
    """Under the name that follows the colon; `extra` has the facts."""
    with nanwatch.watch(
        model := nn.Sequential(Scale(float("inf"))), sinks="logging:train.numbers", on_nonfinite="record"
    ):
        model(torch.ones(2))
    (record,) = [one for one in caplog.records if one.name == "train.numbers"]
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith("inf first seen in `output` of 0 (Scale) in batch 0")
    facts: Any = vars(record)["nanwatch"]
    assert facts["facts"]["module"] == "0"
