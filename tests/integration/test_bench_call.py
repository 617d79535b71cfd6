"""The benchmark of a single call: a call and a batch are told apart, and every way runs and is taken off again."""

from __future__ import annotations

from types import ModuleType

import pytest

from support.paths import BENCHMARKS


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_call

    return bench_call


def test_calls_and_batches_are_told_apart(bench: ModuleType) -> None:
    """With 2 us a call and 50 us a batch on top of any plain time, that is what comes out."""
    from _timing import Samples

    plain = {length: [length * 1e-5, length * 3e-5] for length in (bench.SHORT, bench.LONG)}
    rounds = {f"plain {length}": seconds for length, seconds in plain.items()}
    for length, seconds in plain.items():
        rounds[f"watched {length}"] = [one + (length + 1) * 2e-6 + 5e-5 for one in seconds]
    assert bench.costs(Samples(rounds), "watched") == pytest.approx((2e-6, 5e-5))


def test_a_quick_run_has_all_ways(bench: ModuleType) -> None:
    """A time for each length in each way."""
    samples = bench.measured(bench.QUICK_PLAN)
    names = {f"{way} {length}" for way in bench.WAYS for length in (bench.SHORT, bench.LONG)}
    assert set(samples.rounds) == names
    assert all(min(seconds) > 0 for seconds in samples.rounds.values())
