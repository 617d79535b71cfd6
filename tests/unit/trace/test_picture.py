"""The picture of a run against the records of its frames, one by one, and the words of its page."""

from __future__ import annotations

import random
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from nanwatch.records.headroom import headroom_bits
from nanwatch.trace import picture
from nanwatch.trace.picture import Picture, draw
from nanwatch.trace.trace_file import Trace
from support.html_page import HOSTILE, Page
from support.written_traces import write_rows

DTYPES = ("float16", "float32", "float64", "float8_e4m3fn", "complex64", "int64", "bfloat16", None)
NOTES = (None, None, None, "mask", "allowed", "skipped_step", "not_checked")


def some_trace(path: Path, seed: int) -> Trace:
    """Modules that are first called at any time, in batches that leave out numbers, with every kind of value."""
    chosen = random.Random(seed)
    rows = []
    for batch in sorted(chosen.sample(range(100), 23)):
        for call, module in enumerate(chosen.sample("abcde", chosen.randint(1, 5))):
            for role in ("weight", "input", "output", "gradient"):
                abs_max = chosen.choice(
                    [0.0, 1.0, 2.0**-140, 65504.0, inf, nan, None, chosen.uniform(0, 400)]
                )
                isfinite = None if abs_max is None else abs_max < inf
                dtype = chosen.choice(DTYPES if isfinite is not False else DTYPES[:3])
                rows.append({
                    "batch": batch, "call": call, "module": module, "role": role, "label": role, "dtype": dtype,
                    "abs_max": abs_max, "isfinite": isfinite, "note": chosen.choice(NOTES),
                })  # fmt: skip
    return Trace.open(write_rows(path, rows))


def cells_by_hand(trace: Trace, per_column: int) -> tuple[list[str], dict[tuple[str, int], float], set[int]]:
    """Return the modules in the order of their calls, the least headroom by module and column, and skipped columns."""
    modules: list[str] = []
    least: dict[tuple[str, int], float] = {}
    skipped = set()
    for number, batch in enumerate(trace.batches):
        for frame in trace.frames(batch):
            if frame.name not in modules:
                modules.append(frame.name)
            for record in frame.records:
                if record.note is not None and record.note.kind == "skipped_step":
                    skipped.add(number // per_column)
                bits = headroom_bits(record)
                if bits is not None and (record.role != "input" or record.is_fault):
                    cell = (frame.name, number // per_column)
                    least[cell] = min(bits, least.get(cell, inf))
    return modules, least, skipped


@pytest.mark.parametrize(("seed", "columns", "per_column"), [(0, 1000, 1), (1, 8, 3), (2, 1, 23)])
def test_cells_are_those_of_the_records(
    seed: int, columns: int, per_column: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell has the least headroom of its batches' records, wherever a column begins and ends."""
    monkeypatch.setattr(picture, "COLUMNS", columns)
    trace = some_trace(tmp_path / "run.parquet", seed)
    modules, least, skipped = cells_by_hand(trace, per_column)
    found = draw(trace)
    assert list(found.modules) == modules
    assert found.first.tolist() == list(trace.batches[::per_column])
    assert found.last.tolist()[-1] == trace.batches[-1]
    assert set(np.flatnonzero(found.skipped).tolist()) == skipped
    shown = {
        (module, column): float(bits)
        for module, row in zip(found.modules, found.bits, strict=True)
        for column, bits in enumerate(row)
        if not np.isnan(bits)
    }
    assert shown == pytest.approx(least)
    failures = [
        (batch, frame.name)
        for batch in trace.batches
        for frame in trace.frames(batch)
        if frame.fault is not None
    ]
    assert found.failure == failures[0]


def line(path: Path, modules: dict[str, list[float]]) -> Picture:
    """The picture of float16 outputs with this headroom in each fifth batch."""
    rows = [
        {"batch": 5 * i, "call": call, "module": module, "abs_max": 65504.0 * 2.0 ** -bits[i]}
        for i in range(len(next(iter(modules.values()))))
        for call, (module, bits) in enumerate(modules.items())
    ]
    return draw(Trace.open(write_rows(path, rows)))


def test_rows_are_sorted_and_know_their_trend(tmp_path: Path) -> None:
    """The trend is numpy's line through the points, by 100 batches; the least headroom comes first."""
    noise = np.random.default_rng(0).normal(0, 0.5, 40)
    falling = (20 - 0.05 * np.arange(40) + noise).tolist()
    found = line(tmp_path / "run.parquet", {"still": [12.0] * 40, "falling": falling, "low": [3.0] * 40})
    assert [row.module for row in found.rows] == ["low", "still", "falling"]
    slope = 100 * np.polyfit(5 * np.arange(40), falling, 1)[0]
    assert [row.trend for row in found.rows] == pytest.approx([0.0, 0.0, slope], abs=1e-9)
    assert found.rows[2].batch == 5 * int(np.argmin(falling))
    assert np.isnan(line(tmp_path / "short.parquet", {"a": [3.0] * 7}).rows[0].trend)


def test_the_page_has_the_modules_as_a_table(tmp_path: Path) -> None:
    """With hostile names as text, and a policy that lets nothing run."""
    pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")
    names = [name for name in HOSTILE if "\x00" not in name]
    rows = [
        {"batch": 0, "call": call, "module": name, "abs_max": 2.0**call} for call, name in enumerate(names)
    ]
    page = Page(draw(Trace.open(write_rows(tmp_path / "run.parquet", rows))).to_html())
    assert page.unbalanced == []
    assert not {"img", "iframe", "a", "script", "image"} & {tag for tag, _ in page.tags}
    assert "connect-src" not in page.policy
    assert "default-src 'none'" in page.policy
    assert f"Least headroom: {17.0 - len(names):.1f} bits at {names[-1]}" in page.text
    for call, name in enumerate(names):
        if name.isprintable():
            assert f"{name} {16.0 - call:.1f} bits 0 " in page.text
