"""Sinks: which events each gets, and that one which raises harms neither the run nor the others."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.session.api import DeferredWatch
from nanwatch.sinks.sink import EVENTS, Sink
from nanwatch.util.messages import counts
from support.toys import Scale
from support.watching import watch

ONES = torch.ones(2, dtype=torch.float16)


class Everything(Sink):
    """Takes every event: its name, and what came with it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[Any, ...]]] = []

    def all(self, event: str) -> list[Any]:
        return [args[-1] for name, args in self.events if name == event]

    @property
    def batches(self) -> list[int]:
        return [summary.batch for summary in self.all("on_batch")]


for _event in EVENTS:
    setattr(Everything, _event, lambda self, *args, event=_event: self.events.append((event, args)))


def run(model: nn.Module, batches: int) -> None:
    for _ in range(batches):
        model(ONES)


def test_each_event_comes(tmp_path) -> None:
    """Frames, batches, a non-finite value before its report, forecasts, and the end."""
    sink, model = Everything(), nn.Sequential(Scale())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(model, sinks=sink, log_every=100, on_nonfinite="record", trace=tmp_path / "run") as w:
            for i in range(400):
                model[0].factor = 2.0 ** (i / 30)
                run(model, 1)
            model[0].factor = float("inf")
            run(model, 1)
    frames = [(frame.batch, frame.name) for frame in sink.all("on_frame")]
    assert (frames[:3], len(frames)) == ([(0, "0"), (0, ""), (1, "0")], 2 * 401)
    assert sink.batches == [0, 100, 200, 300]
    num_warned = sum("overflow expected" in str(warning.message) for warning in caught)
    num_noted = nanwatch.Trace.open(w.trace_path).table(["note"])["note"].to_pylist().count("forecast")
    assert len(sink.all("on_forecast")) == num_warned == num_noted > 0
    names = [event for event, _ in sink.events]
    first = names.index("on_nonfinite")
    assert names[first : first + 2] == ["on_nonfinite", "on_failure"]
    assert sink.all("on_nonfinite")[0].batch == sink.all("on_failure")[0].batch
    assert names[-1] == "on_close"


def test_a_skipped_step_comes() -> None:
    sink, model = Everything(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(model, sinks=sink, gradients=True, scaler=scaler):
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert ([step.batch for step in sink.all("on_skipped_step")], sink.all("on_failure")) == ([1], [])


@pytest.mark.parametrize("event", ["on_batch", "on_frame", "on_failure"])
def test_a_sink_that_raises_is_dropped(event: str) -> None:
    """One warning and one count; the failure is raised all the same, and the sink behind it is told."""

    def broken(self: Sink, *_: Any) -> None:
        calls.append(event)
        raise OSError("no route to host")

    calls: list[str] = []
    behind, model = Everything(), nn.Sequential(Scale())
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
    events = [name for name, _ in behind.events]
    assert (behind.batches, events.count("on_failure"), events.count("on_close")) == ([0, 1, 2], 2, 1)


def test_a_misspelt_event_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Slack.on_failures is no event of a sink; close names: on_failure"):
        type("Slack", (Sink,), {"on_failures": print})


def test_a_trainers_callback_closes_a_sink_with_its_watch() -> None:
    """The trial of its options calls nothing, and refuses what `watch` refuses, with the names that there are."""
    sink, model = Everything(), nn.Sequential(Scale())
    sink.every = 3
    deferred = DeferredWatch({"sinks": sink})
    assert sink.events == []
    deferred.start(model)
    run(model, 4)
    deferred.stop()
    assert (sink.batches, sink.events.count(("on_close", ()))) == ([0, 3], 1)
    with pytest.raises(ValueError, match=r"no sink 'bacon'; known are .*wandb.*tensorboard:FOLDER"):
        DeferredWatch({"sinks": "bacon"})
