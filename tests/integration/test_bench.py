"""The range benchmark: its timing and its verdict are right, and a quick run of it works from end to end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.paths import BENCHMARKS
from support.processes import forked


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _timing

    return _timing


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _targets

    return _targets


def _run(*arguments: str, benchmark: str = "bench_range") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{benchmark}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def _dense(targets: ModuleType, numel: int, threads: int = 1, **ratios: float) -> Any:
    return targets.Row("dense", "float32", f"{numel}", numel, 4 * numel, threads, {"nanwatch": 1e-7}, ratios)


@pytest.mark.slow
def test_a_quick_run_has_rows_and_finite_ratios(tmp_path: Path) -> None:
    """A quick run verifies, times and writes rows of dense and strided tensors with nothing but finite numbers."""
    pytest.importorskip("transformers")
    path = tmp_path / "range.json"
    threads = sorted({1, min(2, os.cpu_count() or 1)})
    result = _run("--quick", "--json", str(path), "--threads", *map(str, threads))
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_text())
    assert {row["kind"] for row in document["rows"]} == {"dense", "strided"}
    assert {row["threads"] for row in document["rows"]} == set(threads)
    for row in document["rows"]:
        assert row["ratios"]
        for value in (*row["seconds"].values(), *row["ratios"].values(), row["gigabytes_per_second"]):
            assert math.isfinite(value)
            assert value > 0
    dense = [row for row in document["rows"] if row["kind"] == "dense"]
    assert all(
        {"plain", "floor", "health", "transformers", "aminmax"} <= row["ratios"].keys() for row in dense
    )
    assert document["targets"]
    assert document["machine"]["cpu"]


@pytest.mark.slow
def test_a_quick_rerun_has_the_whole_report(tmp_path: Path) -> None:
    """A quick run of the other benchmark: each failure is explained in every way, with a cure, and all is timed."""
    for package in ("transformers", "safetensors", "jinja2"):
        pytest.importorskip(package)
    path = tmp_path / "rerun.json"
    result = _run("--quick", "--json", str(path), benchmark="bench_rerun")
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_text())
    # A capsule and three forms of the report, and the patch.
    assert {name: case["files"] for name, case in document["cases"].items()} == {"overflow": 4, "no_token": 5}
    for case in document["cases"].values():
        assert set(case["times_s"]) == {"first report only", "second run and cures", "and everything written"}
        assert case["cures"]
        assert case["bound_s"] == pytest.approx(8 * case["forward_s"] + 2)


@pytest.mark.slow
def test_a_wrong_answer_ends_the_run_before_timing(tmp_path: Path) -> None:
    """A range that is wrong in one number is refused, and no row is printed."""
    program = (
        "import sys, nanwatch\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "right = nanwatch.abs_range\n"
        "nanwatch.abs_range = lambda x: right(x)._replace(abs_max=1e9)\n"
        "import bench_range\n"
        "bench_range.main(['--quick', '--only', 'aminmax'])\n"
    )
    result = forked("-c", program)
    assert result.returncode != 0
    assert "nothing was timed" in result.stderr
    assert "GB/s" not in result.stdout


@pytest.mark.slow
def test_a_size_that_is_no_size_is_named() -> None:
    """A wrong argument is told with the value given and what is accepted."""
    result = forked(str(BENCHMARKS / "bench_range.py"), "--sizes", "1.5")
    assert result.returncode == 2
    assert "'1.5'" in result.stderr
    assert "whole number" in result.stderr


def test_a_ratio_is_the_median_of_the_rounds_ratios(timing: ModuleType) -> None:
    """A machine that slows down threefold for one round changes no ratio."""
    samples = timing.Samples({"slow": [2.0, 6.0, 2.0], "base": [1.0, 3.0, 1.0]})
    assert samples.ratio("slow", "base") == 2.0
    assert samples.seconds("slow") == 2.0


def test_interleaved_rounds_time_each_candidate_once_a_round(timing: ModuleType) -> None:
    """Every candidate has one sample a round, at most the maximum of rounds, and a slower one has a longer time."""
    plan = timing.Plan(min_rounds=3, max_rounds=4, budget=60.0, sample=1e-4)
    candidates = {"short": timing.Candidate(sum, (1, 2)), "long": timing.Candidate(sum, range(20_000))}
    samples = timing.interleave(candidates, plan)
    assert [len(samples.rounds[name]) for name in candidates] == [4, 4]
    assert samples.ratio("long", "short") > 10


def test_the_worst_row_decides(targets: ModuleType) -> None:
    """One row below its bound misses the target and is named, and one at the bound passes."""
    rows = [_dense(targets, 100, transformers=40.0), _dense(targets, 1000, transformers=39.9)]
    (verdict,) = targets.judge(rows)
    assert (verdict.passed, verdict.where) == (False, "float32 1000, 1 thread")
    (verdict,) = targets.judge(rows[:1])
    assert verdict.passed


@pytest.mark.parametrize("read", ["plain", "floor"])
def test_a_read_is_judged_from_64_kib_up_and_by_threads(targets: ModuleType, read: str) -> None:
    """Small tensors do not count, and a good median at one thread does not hide a bad one at two."""
    rows = [_dense(targets, 1000, **{read: 0.1}), _dense(targets, 16384, **{read: 1.0})]
    assert all(target.passed for target in targets.judge(rows))
    rows += [_dense(targets, 16384, threads=2, **{read: 0.92}), _dense(targets, 1_000_000, **{read: 1.0})]
    median, each = targets.judge(rows)
    assert (median.passed, each.passed) == (False, True)
    assert "2 threads" in median.where
    *_, each = targets.judge([*rows, _dense(targets, 20_000, **{read: 0.89})])
    assert (each.passed, each.where) == (False, "float32 20000, 1 thread")


def test_the_fastest_read_is_kept_by_time_and_in_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster plain read counts, and as floor the fastest of all; times and ratios are those of the same read."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from bench_range import keep_fastest_reads

    seconds = {"nanwatch": 1.0, "plain": 2.0, "plain threads": 3.0, "floor": 4.0, "floor threads": 1.5}
    ratios = {"plain": 20.0, "plain threads": 30.0, "floor": 40.0, "floor threads": 15.0}
    keep_fastest_reads(seconds, ratios)
    assert seconds == {"nanwatch": 1.0, "plain": 2.0, "floor": 1.5}
    assert ratios == {"plain": 20.0, "floor": 15.0}

    seconds, ratios = {"plain": 2.0, "floor": 4.0}, {"plain": 20.0, "floor": 40.0}
    keep_fastest_reads(seconds, ratios)
    assert (seconds, ratios) == ({"plain": 2.0, "floor": 2.0}, {"plain": 20.0, "floor": 20.0})

    seconds = {"nanwatch": 1.0}
    keep_fastest_reads(seconds)
    assert seconds == {"nanwatch": 1.0}
