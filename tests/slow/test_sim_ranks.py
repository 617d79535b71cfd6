"""benchmarks/sim_ranks.py and count_verdict.py: every writer is right, and the traffic is what its parts are."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from support.paths import BENCHMARKS

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
]


def test_every_writer_names_the_true_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both scenarios; the messages of a writer do not depend on the others, the keys not on the writers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sim_ranks = importlib.import_module("sim_ranks")
    told: list[str] = []
    path = tmp_path / "sim.json"
    assert sim_ranks.main(["--writers", "24", "--json", str(path)], told.append) == 0, told
    outcomes = {one["scenario"]: one for one in json.loads(path.read_text())}
    assert set(outcomes) == set(sim_ranks.SCENARIOS)
    for name, one in outcomes.items():
        assert (one["writers"], one["right"], one["errors"]) == (24, 24, [])
        assert one["connections"] == 2 * 24  # its own and that of its verdict
        assert one["messages"] == sum(one["by_call"].values())
        assert one["bytes_sent"] > 10 * one["messages"]
        # Requests that a sighting needs, for one rank or all, not counting the questions whether there is news.
        failed = 24 if name == "all fail at once" else 1
        assert one["by_call"]["compare_set"] >= failed
        assert one["by_call"]["set"] == failed + 1  # and the one that says that all are there
        assert one["keys"] <= 8
        assert name in told[0]


def test_the_steps_of_one_rank_do_not_grow_with_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmarks/count_verdict.py for two sizes of job: as many calls, and as many bytes but for a few digits."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    count_verdict = importlib.import_module("count_verdict")
    path = tmp_path / "verdict.json"
    told: list[str] = []
    assert count_verdict.main(["--ranks", "3", "200", "--json", str(path)], told.append) == 0
    steps = json.loads(path.read_text())
    few, many = ([one for one in steps if one["ranks"] == ranks] for ranks in (3, 200))
    assert [(one["what"], one["by_call"]) for one in few] == [(one["what"], one["by_call"]) for one in many]
    for one, other in zip(few, many, strict=True):
        assert abs(one["sent"] - other["sent"]) <= 8  # a rank has more digits
        assert one["received"] == pytest.approx(other["received"], abs=8)
    calls = {one["what"]: one["by_call"] for one in few}
    assert calls["looks while all is well"] == {"check": 1}
    assert calls["fails"]["compare_set"] == calls["fails"]["set"] == 1
    # It says that it has had its say, if that is new, and farewell.
    assert calls["settles without having failed"]["add"] == calls["settles then"]["add"] + 1
    assert "200 ranks, all fail at once" in told[0]
