"""Sinks: which events each gets, and that one which raises harms neither the run nor the others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.history.forecast import Forecast
from nanwatch.records.record import Frame
from nanwatch.report.events import SkippedStep
from nanwatch.report.finding import Finding
from nanwatch.report.report import Report
from nanwatch.report.spike import SpikeReport
from nanwatch.session.api import DeferredWatch
from nanwatch.sinks.sink import BatchSummary, Sink
from nanwatch.util.visible import counts
from support.toys import Scale
from support.watching import watch

ONES = torch.ones(2, dtype=torch.float16)


class Failures(Sink):
    """Takes failures and batches, and nothing else."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.batches: list[int] = []
        self.closed = 0

    def on_batch(self, summary: BatchSummary) -> None:
        self.batches.append(summary.batch)

    def on_failure(self, report: Report) -> None:
        self.reports.append(report)

    def on_close(self) -> None:
        self.closed += 1


class Everything(Sink):
    """Takes every event, by its name."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_batch(self, summary: BatchSummary) -> None:
        self.events.append(("batch", summary.batch))

    def on_frame(self, frame: Frame) -> None:
        self.events.append(("frame", (frame.batch, frame.name)))

    def on_nonfinite(self, finding: Finding) -> None:
        self.events.append(("nonfinite", finding.batch))

    def on_failure(self, report: Report) -> None:
        self.events.append(("failure", report.batch))

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        self.events.append(("forecast", forecast.module))

    def on_spike(self, report: SpikeReport) -> None:
        self.events.append(("spike", report.cause))

    def on_skipped_step(self, step: SkippedStep) -> None:
        self.events.append(("skipped", step.batch))

    def on_close(self) -> None:
        self.events.append(("close", None))

    def all(self, event: str) -> list[Any]:
        return [value for name, value in self.events if name == event]


def run(model: nn.Module, batches: int) -> None:
    for _ in range(batches):
        model(ONES)


def test_each_event_comes() -> None:
    """Frames, batches, a non-finite value before its report, forecasts, and the end."""
    sink, model = Everything(), nn.Sequential(Scale())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(model, sinks=sink, log_every=100, on_nonfinite="record"):
            for i in range(400):
                model[0].factor = 2.0 ** (i / 30)
                run(model, 1)
            model[0].factor = float("inf")
            run(model, 1)
    assert sink.all("frame")[:3] == [(0, "0"), (0, ""), (1, "0")]
    assert len(sink.all("frame")) == 2 * 401
    assert sink.all("batch") == [0, 100, 200, 300]
    forecasts = [warning for warning in caught if "overflow expected" in str(warning.message)]
    assert len(sink.all("forecast")) == len(forecasts) > 0
    first = sink.all("nonfinite")[0]
    assert sink.events.index(("nonfinite", first)) + 1 == sink.events.index(("failure", first))
    assert sink.events[-1] == ("close", None)


def test_a_skipped_step_comes() -> None:
    """With the batch whose gradients were not finite."""
    sink, model = Everything(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(model, sinks=sink, gradients=True, scaler=scaler):
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert sink.all("skipped") == [1]
    assert sink.all("failure") == []


@pytest.mark.parametrize("event", ["on_batch", "on_frame", "on_nonfinite", "on_failure", "on_close"])
def test_a_sink_that_raises_is_dropped(event: str) -> None:
    """One warning and one count; the failure is raised all the same, and the sink behind it is told."""

    def broken(self: Sink, *_: Any) -> None:
        calls.append(event)
        raise OSError("no route to host")

    calls: list[str] = []
    behind, model = Failures(), nn.Sequential(Scale())
    before = counts[f"a sink raised in {event}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        broken_sink = type("Slack", (Sink,), {event: broken})()
        with watch(model, sinks=[broken_sink, behind], log_every=1, rerun=False):
            run(model, 3)
            model[0].factor = float("inf")
            for _ in range(2):
                with pytest.raises(nanwatch.NonFiniteError, match="inf first seen in `output` of 0"):
                    run(model, 1)
    assert calls == [event]
    assert counts[f"a sink raised in {event}"] == before + 1
    (message,) = [str(warning.message) for warning in caught]
    assert "nanwatch logs no more to the sink Slack, which raised OSError: no route to host" in message
    assert (behind.batches, len(behind.reports), behind.closed) == ([0, 1, 2], 2, 1)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no sink 'bacon'; known are jsonl, prometheus.*tensorboard:FOLDER"):
        watch(nn.Identity(), sinks="bacon")


def test_a_misspelt_event_is_refused() -> None:
    """When the class is made, with the close names."""
    with pytest.raises(TypeError, match=r"Slack.on_failures is no event of a sink; close names: on_failure"):
        type("Slack", (Sink,), {"on_failures": print})


def test_a_trainers_callback_closes_a_sink_with_its_watch() -> None:
    """The trial of its options calls nothing, and refuses what `watch` refuses."""
    sink, model = Failures(), nn.Sequential(Scale())
    sink.every = 3
    deferred = DeferredWatch({"sinks": sink})
    assert sink.closed == 0
    deferred.start(model)
    run(model, 4)
    deferred.stop()
    assert (sink.batches, sink.closed) == ([0, 3], 1)
    with pytest.raises(ValueError, match="there is no sink 'x'"):
        DeferredWatch({"sinks": "x"})
