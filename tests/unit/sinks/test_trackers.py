"""Headroom against the records of the same frames, and what is logged of a forecast and a failure."""

from math import inf, log2

import pytest
import torch

from nanwatch.history.forecast import Forecast
from nanwatch.numerics.ranges import tensor_health
from nanwatch.records.record import Frame, Record
from nanwatch.report.finding import find
from nanwatch.report.text import summary
from nanwatch.sinks.sink import BatchSummary
from nanwatch.sinks.trackers import LogSink, batch_values


def test_the_numbers_of_a_batch_are_the_doublings_left() -> None:
    """By module over all its calls, the worst first; neither inputs nor zeros, and no module beyond those shown."""
    batch = BatchSummary(3, {})
    for name, role, high in (
        ("a", "output", 8.0),
        ("", "input", 64.0),
        ("a", "weight", 32.0),
        ("", "output", 2.0),
    ):
        record = Record(role, role, (2,), "float16", 0.0, high, True, None)  # type: ignore[arg-type]
        batch.frames.append(Frame(3, name, "M", (record,)))
    bits = {"a": log2(65504 / 32), "(root)": log2(65504 / 2)}
    expected = {f"nanwatch_headroom_bits/{name}": room for name, room in bits.items()}
    values = batch_values(batch)
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert values["nanwatch/headroom_bits"] == values["nanwatch_headroom_bits/a"]
    assert values["nanwatch/headroom_module"] == "a weight, float16"
    full = BatchSummary(4, dict.fromkeys(["a", *map(str, range(255))]))
    full.frames = batch.frames
    assert (set(full.headroom), set(full.curves)) == ({"a", ""}, {"a"})


def test_a_forecast_and_a_fault_are_numbers_and_words() -> None:
    """The batch of the expected overflow and the sentence; a flag and the summary, and no headroom that is not left."""
    health = tensor_health(torch.tensor([1.0, inf]))
    record = Record("output", "output", (2,), "float32", 1.0, inf, False, health)
    finding = find([Frame(4, "wo", "Linear", (record,))])
    assert finding is not None
    entries: list[tuple[int, dict[str, float | str]]] = []
    sink = LogSink(lambda values, batch: entries.append((batch, values)))
    forecast = Forecast("", "output", "float16", 1.9, 0.4, 5300, 600)
    sink.on_forecast(7, forecast)
    sink.on_nonfinite(finding)
    assert entries == [
        (7, {"nanwatch_forecast_batch/(root)": 5300.0, "nanwatch/forecast": str(forecast)}),
        (4, {"nanwatch/is_finite": 0.0, "nanwatch/finding": summary(finding)}),
    ]
