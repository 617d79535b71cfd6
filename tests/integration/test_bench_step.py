"""The step benchmark on a tiny model: every way runs and leaves the model as it was; rows hold what was asked for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from support.paths import BENCHMARKS
from support.recorders import needs_native
from support.toys import mlp


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    pytest.importorskip("pyarrow")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_step

    return bench_step


def training(model: nn.Module, seen: list[object]) -> None:
    """One step; notes what a backward meets."""
    model(torch.ones(2, 3)).sum().backward()
    seen.append((torch.is_anomaly_enabled(), sum(x._backward_hooks is not None for x in model.parameters())))
    model.zero_grad()


@needs_native
def test_a_row_has_every_way(bench: ModuleType) -> None:
    """All ways together: a ratio each, what was read and what is added; nothing is left on the model."""
    model = mlp()
    seen: list[object] = []
    row = bench.measure(model, lambda: training(model, seen), set(bench.NAMES), 0.0, 3, 1e9)
    ways = [
        "nanwatch",
        "transformers",
        "hooks",
        "forecast_off",
        "no_box",
        "trace",
        "fingerprints",
        "gradients",
    ]
    ways += ["statistics", "detect_anomaly", "debug_mode"]
    assert {key for key in row if key.startswith("ratio_")} == {f"ratio_{way}" for way in ways}
    assert all(row[f"ratio_{way}"] > 0 for way in ways)
    assert row["rounds"] == 3
    assert row["calls"] == 4
    assert row["ratio_trace"] > row["trace_writer_share"] >= 0
    assert row.keys() >= {"added_by_trace", "added_by_gradients", "added_ratio", "own_share", "floor_s"}
    assert row["floor_share_gradients"] == row["bytes_read_gradients"] / 1e9 / row["plain_s"] > 0
    # Differences of two times, which can be below 0 on a busy machine.
    assert row.keys() >= {"own_share_gradients", "own_share_fingerprints"}
    # Fourteen ways, three timed watches among them: two steps to warm up and three rounds.
    assert len(seen) == 15 * 2 + 15 * 3
    assert sum(anomaly for anomaly, _ in seen) == 2 + 3
    for module in model.modules():
        assert module._compiled_call_impl is None
        assert not module._forward_hooks
    assert all(not x._backward_hooks for x in model.parameters())


@needs_native
def test_only_the_ways_that_were_asked_for_run(bench: ModuleType) -> None:
    """`--ways gradients`: the plain way and that one, and no column of the others."""
    model = mlp()
    row = bench.measure(model, lambda: training(model, []), {"gradients"}, 0.0, 2, 1e9)
    assert {key for key in row if key.startswith(("ratio_", "added_"))} == {"ratio_gradients"}
    row |= {"model": "mlp", "step": "training", "misses": bench.misses("training", row)}
    cells = {heading: bench.cell(row, heading) for heading in bench.COLUMNS}
    assert cells["gradients"] != "-"
    assert cells["trace"] == cells["nanwatch"] == cells["own"] == cells["misses"] == "-"


@needs_native
def test_gradients_are_seen_in_their_own_way_alone(bench: ModuleType, tmp_path: Path) -> None:
    """Every time it is entered the gradients of all weights are seen again; outside, no hook of it is on a weight."""
    model = mlp()
    ways = bench.Ways(model, {"gradients"}, tmp_path)
    watch, timed = ways._watches
    assert ways.timed == {"gradients": timed}
    counts = []
    for name in ("gradients", "plain", "gradients", "gradients"):
        before = watch.counters["frames"]
        with ways.by_name[name]():
            training(model, [])
        counts.append(watch.counters["frames"] - before)
    ways.stop()
    assert counts == [8, 0, 8, 8]
    weights = [
        r.label for f in watch.frames if f.phase == "backward" for r in f.records if "weight" in r.label
    ]
    assert weights.count("weight.grad") == 2 * 3


def test_what_is_missed_is_named(bench: ModuleType) -> None:
    """Two per cent for gradients and for a trace, in training; and nothing for what was not measured."""
    row = {"own_share_gradients": 0.021, "added_by_trace": 0.02}
    assert bench.misses("training 8 images", row) == ["own time of gradients"]
    assert bench.misses("forward 1 image", row) == []
    assert bench.misses("training 8 images", {}) == []
