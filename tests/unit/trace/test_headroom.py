"""The picture of a run against the records of its frames, one by one, its page, and the formats that would hold it."""

import random
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.records.record import headroom_bits
from nanwatch.trace.headroom import draw, fits
from nanwatch.trace.trace_file import Trace
from support.written_traces import write_rows

DTYPES = ("float16", "float32", "float64", "float8_e4m3fn", "complex64", "int64", "bfloat16", None)
NOTES = (None, None, None, "mask", "allowed", "skipped_step", "not_checked")


def some_trace(path: Path) -> Trace:
    """Modules that are first called at any time, in batches that leave out numbers, with every kind of value."""
    chosen = random.Random(0)
    rows = []
    for batch in sorted(chosen.sample(range(100), 23)):
        for call, module in enumerate(chosen.sample("abcde", chosen.randint(1, 5))):
            for role in ("weight", "input", "output", "gradient"):
                abs_max = chosen.choice([0.0, 1.0, 2**-140, 65504.0, inf, nan, None, chosen.uniform(0, 400)])
                isfinite = None if abs_max is None else abs_max < inf
                dtype = chosen.choice(DTYPES if isfinite is not False else DTYPES[:3])
                rows.append({
                    "batch": batch, "call": call, "module": module, "role": role, "label": role, "dtype": dtype,
                    "abs_max": abs_max, "isfinite": isfinite, "note": chosen.choice(NOTES),
                })  # fmt: skip
    return Trace.open(write_rows(path, rows))


def test_headroom_is_that_of_the_records(tmp_path: Path) -> None:
    """Of each module over its batches, of each batch over its modules, the trend, and the failures."""
    trace = some_trace(tmp_path / "run.parquet")
    least: dict[tuple[str, int], float] = {}
    skipped, failures = set(), []
    for batch in trace.batches:
        for frame in trace.frames(batch):
            failures += [(batch, frame.name)] if frame.fault is not None else []
            for record in frame.records:
                if record.note is not None and record.note.kind == "skipped_step":
                    skipped.add(batch)
                bits = headroom_bits(record)
                if bits is not None and (record.role != "input" or record.is_fault):
                    least[frame.name, batch] = min(bits, least.get((frame.name, batch), inf))
    drawn = draw(trace)
    modules = {name: [bits for (module, _), bits in least.items() if module == name] for name, _ in least}
    rows = {row.module: (row.bits, row.num_failed) for row in drawn.rows}
    assert rows == {x: (pytest.approx(min(y)), y.count(-inf)) for x, y in modules.items()}
    assert [row.bits for row in drawn.rows] == sorted(row.bits for row in drawn.rows)
    assert all(least[row.module, row.batch] == pytest.approx(row.bits) for row in drawn.rows)
    assert [number for number, *_ in drawn.batches] == list(trace.batches)
    assert {number for number, *_, is_skipped in drawn.batches if is_skipped} == skipped
    for number, bits, module, _ in drawn.batches:
        known = [value for (_, batch), value in least.items() if batch == number]
        assert (bits == pytest.approx(min(known))) if known else np.isnan(bits)
        assert not known or least[module, number] == pytest.approx(bits)
    for row in drawn.rows:  # the trend is numpy's line through the finite points, by 100 batches
        points = [(batch, y) for (name, batch), y in least.items() if name == row.module and y > -inf]
        trend = 100 * np.polyfit(*zip(*points, strict=True), 1)[0] if len(points) >= 8 else nan
        assert row.trend == pytest.approx(trend, nan_ok=True)
    assert drawn.failure[:2] == failures[0]


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize(
    ("least", "most", "verdict", "narrowest"),
    [
        (1e-9, 1.0, "fits", "float8_e5m2"),
        (1e-9, 1e-6, "becomes zero", "bfloat16"),
        (0.5, 40000.0, "no room", "bfloat16"),
        (0.5, 70000.0, "overflows", "bfloat16"),
        (0.5, torch.nan, "not finite", None),
    ],
)
def test_the_verdict_on_float16(
    tmp_path: Path, least: float, most: float, verdict: str, narrowest: str | None
) -> None:
    """An element that becomes zero matters beside the largest of its tensor alone."""
    net = nn.Sequential(nn.Linear(2, 1, bias=False))
    net[0].weight.data = torch.tensor([[least, most]])
    path = tmp_path / "run.parquet"
    with watch(net, trace=path, on_nonfinite="record", rerun=False):
        net(torch.ones(1, 2))
    (weights,) = (need for need in fits(path) if need.part == "weights")
    assert (weights.verdicts["float16"], weights.fits) == (verdict, narrowest)
