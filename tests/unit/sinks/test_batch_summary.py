"""The summary of a batch and its log entry, against by_module and numpy's histogram of the same frames."""

from __future__ import annotations

from math import inf, isfinite, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.history.forecast import Forecast
from nanwatch.numerics.ranges import tensor_health
from nanwatch.records.headroom import by_module
from nanwatch.records.note import Note
from nanwatch.records.record import Frame, Record
from nanwatch.report.finding import find
from nanwatch.report.text import summary
from nanwatch.sinks.batch_summary import BatchSummary, Histogram
from nanwatch.sinks.logs import FunctionSink, batch_entry, nonfinite_entry

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


def taken(given: list[Frame]) -> BatchSummary:
    summary = BatchSummary(3)
    for frame in given:
        summary.add(frame)
    return summary


@given(st.lists(frames(), max_size=6))
def test_the_headroom_is_that_of_the_frames(made: list[Frame]) -> None:
    """By module the least bits over all calls, the worst module first and named; what has no number is left out."""
    expected = {name: bits for name, bits in by_module(list(made)).items() if isfinite(bits)}
    log = taken(made)
    found = {name: bits for name, (bits, _, _) in log.headroom.items()}
    assert found == expected
    assert list(found.values()) == sorted(expected.values())
    entry = batch_entry(log, ["a", "", "elsewhere"])
    shown = {name: entry.scalars.get(f"nanwatch_headroom_bits/{name or '(root)'}") for name in ("a", "")}
    assert shown == {name: expected.get(name) for name in ("a", "")}
    assert "nanwatch_headroom_bits/elsewhere" not in entry.scalars
    assert entry.scalars.get("nanwatch/headroom_bits") == min(expected.values(), default=None)
    assert entry.scalars["nanwatch/is_finite"] == 1.0
    assert all(map(isfinite, entry.scalars.values()))
    if expected:
        name, (_, label, dtype) = next(iter(log.headroom.items()))
        assert entry.texts["nanwatch/headroom_module"] == f"{name or '(root)'} {label}, {dtype}"


@given(st.lists(frames(), min_size=1, max_size=6))
def test_the_ranges_are_the_largest_of_each_tensor(made: list[Frame]) -> None:
    """Each tensor counts once, with its largest value over its calls, by role; inputs and zeros do not count."""
    largest: dict[Any, float] = {}
    for frame in made:
        for row in frame.records:
            if row.abs_max is not None and row.role != "input":
                key = (row.role, frame.name, row.label, row.dtype)
                largest[key] = max(row.abs_max, largest.get(key, 0.0))
    expected: dict[str, list[float]] = {}
    for (role, *_), value in largest.items():
        if value:
            expected.setdefault(role, []).append(log2(value))
    found = batch_entry(taken(made), ()).histograms
    assert {tag.removeprefix("nanwatch_log2_abs_max/") for tag in found} == set(expected)
    for role, values in expected.items():
        one = found[f"nanwatch_log2_abs_max/{role}"]
        assert (sum(one.counts), one.least, one.most) == (len(values), min(values), max(values))


@given(st.lists(st.floats(-1074, 1024), min_size=1, max_size=40))
def test_the_histogram_is_numpys(values: list[float]) -> None:
    """The counts between the edges, which are evenly spaced whole numbers, are those that numpy finds."""
    made = Histogram.of(values)
    assert len(made.edges) == len(made.counts) + 1 <= 513
    assert made.edges[0] <= min(values)
    assert max(values) < made.edges[-1]
    assert len(set(np.diff(made.edges))) == 1
    assert all(edge == int(edge) for edge in made.edges)
    counts, _ = np.histogram(values, bins=made.edges)
    assert list(made.counts) == counts.tolist()
    assert made.sum == pytest.approx(np.sum(values))
    assert made.sum_of_squares == pytest.approx(np.sum(np.square(values)))


@pytest.mark.parametrize(("module", "tag"), [("wo", "wo"), ("", "(root)")])
def test_a_forecast_is_a_number_and_words(module: str, tag: str) -> None:
    """The batch of the expected overflow, and the sentence, at the batch that led to it."""
    entries: list[tuple[int, dict[str, float | str]]] = []
    told = Forecast(module, "output", "float16", 1.9, 0.4, 5300, 600)
    FunctionSink(lambda values, batch: entries.append((batch, values))).on_forecast(7, told)
    assert entries == [(7, {f"nanwatch_forecast_batch/{tag}": 5300.0, "nanwatch/forecast": str(told)})]


def test_a_fault_is_a_flag_and_the_summary() -> None:
    """No headroom is logged of what has none left."""
    import torch

    health = tensor_health(torch.tensor([1.0, inf]))
    row = Record("output", "output", (2,), "float32", 1.0, inf, False, health)
    finding = find([Frame(4, "wo", "Linear", (row,))])
    assert finding is not None
    entry = nonfinite_entry(finding)
    assert (entry.batch, dict(entry.scalars)) == (4, {"nanwatch/is_finite": 0.0})
    assert dict(entry.texts) == {"nanwatch/finding": summary(finding)}
