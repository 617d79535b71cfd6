"""Headroom against the records of the same frames, and what is logged of a forecast and a failure."""

from __future__ import annotations

from math import inf, isfinite

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nanwatch.history.forecast import Forecast
from nanwatch.numerics.ranges import tensor_health
from nanwatch.records.headroom import by_module, headroom_bits
from nanwatch.records.note import Note
from nanwatch.records.record import Frame, Record
from nanwatch.report.finding import find
from nanwatch.report.text import summary
from nanwatch.session.api import DeferredWatch
from nanwatch.sinks.sink import BatchSummary
from nanwatch.sinks.trackers import FunctionSink, LeastHeadroom, batch_values
from support.toys import Scale

magnitudes = st.floats(min_value=0, max_value=60000.0, allow_subnormal=False)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    """A finite frame; what was not read and what has no headroom are among its rows."""
    rows: list[Record] = []
    for role in draw(st.lists(st.sampled_from(["weight", "buffer", "input", "output"]), max_size=4)):
        dtype = draw(st.sampled_from(["float16", "bfloat16", "int64"]))
        high = draw(magnitudes)
        rows.append(Record(f"{role}{draw(st.integers(0, 1))}", role, (2,), dtype, 0.0, high, True, None))  # type: ignore[arg-type]
    rows.append(Record("input[1]", "input", None, "", None, None, None, None, Note("absent")))
    return Frame(3, draw(st.sampled_from(["", "a", "a.b"])), "M", tuple(rows))


@given(st.lists(frames(), max_size=6))
def test_the_headroom_is_that_of_the_frames(made: list[Frame]) -> None:
    """By module the least bits over all calls, the worst module first and named; what has no number is left out."""
    expected: dict[str, float] = {}
    for frame in made:
        for record in frame.records:
            bits = headroom_bits(record)
            if record.role != "input" and bits is not None and isfinite(bits):
                expected[frame.name] = min(bits, expected.get(frame.name, inf))
    batch = BatchSummary(3)
    batch.frames.extend(made)
    assert {name: bits for name, (bits, _, _) in batch.headroom.items()} == expected
    assert [bits for bits, _, _ in batch.headroom.values()] == sorted(expected.values())
    values = batch_values(batch)
    for name in ("a", ""):
        assert values.get(f"nanwatch_headroom_bits/{name or '(root)'}") == expected.get(name)
    assert values.get("nanwatch/headroom_bits") == min(expected.values(), default=None)
    if expected:
        name, (_, label, dtype) = next(iter(batch.headroom.items()))
        assert values["nanwatch/headroom_module"] == f"{name or '(root)'} {label}, {dtype}"


def test_a_forecast_and_a_fault_are_numbers_and_words() -> None:
    """The batch of the expected overflow and the sentence; a flag and the summary, and no headroom that is not left."""
    health = tensor_health(torch.tensor([1.0, inf]))
    record = Record("output", "output", (2,), "float32", 1.0, inf, False, health)
    finding = find([Frame(4, "wo", "Linear", (record,))])
    assert finding is not None
    entries: list[tuple[int, dict[str, float | str]]] = []
    sink = FunctionSink(lambda values, batch: entries.append((batch, values)))
    forecast = Forecast("", "output", "float16", 1.9, 0.4, 5300, 600)
    sink.on_forecast(7, forecast)
    sink.on_nonfinite(finding)
    assert entries == [
        (7, {"nanwatch_forecast_batch/(root)": 5300.0, "nanwatch/forecast": str(forecast)}),
        (4, {"nanwatch/is_finite": 0.0, "nanwatch/finding": summary(finding)}),
    ]


def test_the_least_headroom_is_that_of_all_frames_since_it_was_taken() -> None:
    """Over two batches of two formats, with its place; zeros have none."""
    net, least = nn.Sequential(Scale(1e30), Scale(1e4)), LeastHeadroom()
    deferred = DeferredWatch({"max_frames": 100}, least)
    watch = deferred.start(net)
    net(torch.zeros(2))
    assert least.take() is None
    seen = len(watch.frames)
    net(torch.ones(2, dtype=torch.float64))
    net(torch.ones(2))
    rooms, tensor = by_module(watch.frames[seen:]), least.take()
    assert tensor is not None
    assert tensor == rooms[tensor.module]
    assert tensor.bits == min(rooms.values()).bits
    assert tensor.place == "1 output, float32"
    assert least.take() is None
    deferred.stop()
