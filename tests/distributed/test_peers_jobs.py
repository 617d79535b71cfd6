"""Real jobs of several ranks, with and without torchrun: whichever fails, every rank says where it was first."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nanwatch.ranks.merge import merge
from support.netcheck_ranks import free_port, rank_environment, run_ranks
from support.paths import SCRIPTS
from support.processes import forking_python

_SCRIPT = SCRIPTS / "rank_scenarios.py"
_GUILTY = re.compile(
    r"first seen in `\S+` of (the root module|\S+) \(\w+\) in .*?batch \d+ on (?:rank (\d+)|(?:all )?(\d+) ranks)"
)
_IN_STAGES = ("pipeline", "stages")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]
_ports: set[int] = set()


def scenario(way: str, kind: str, rank: int, batch: int = 3, **more: Any) -> dict[str, Any]:
    # Two scenarios of one job with one port would meet in one store, and wait for each other.
    while (port := free_port()) in _ports:
        pass
    _ports.add(port)
    return {"way": way, "kind": kind, "rank": rank, "batch": batch, "port": port, **more}


def each_kind(way: str, world_size: int) -> list[dict[str, Any]]:
    """All that may happen, each on the last rank that it may happen to."""
    # A batch of a pipeline begins in its first stage, whose ranks alone are given data. Its stages never fail at once.
    kinds = ["module", "data", "straggler", *["all"] * (way not in _IN_STAGES)]
    ranks = {"data": {"pipeline": 1, "stages": world_size // 2}.get(way, world_size)}
    return [
        scenario(way, kind, ranks.get(kind, world_size) - 1, 1 + number, act_at=("auto", "batch")[number % 2])
        for number, kind in enumerate(kinds)
    ]


def told_by(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run(
    scenarios: list[dict[str, Any]], world_size: int, folder: Path, *options: str
) -> list[dict[str, Any]]:
    """Return what the ranks print under torchrun with these options, whose status the last scenario makes."""
    given = folder / "scenarios.json"
    given.write_text(json.dumps(scenarios))
    options = options or ("--master_port", str(free_port()))
    line = [forking_python(), "-m", "torch.distributed.run", f"--nproc_per_node={world_size}", *options]
    line += [str(_SCRIPT), str(given), str(folder)]
    env, seconds = rank_environment(PYTHON_EXEC=forking_python()), 60 + 30 * len(scenarios)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == int(bool(scenarios[-1].get("exits"))), done.stderr[-3000:]
    entries = told_by(done)
    assert entries, done.stderr[-3000:]
    return entries


def check(played: dict, told: list[dict], world_size: int, folder: Path, attempt: int | None = None) -> None:
    """All ranks name the guilty one; so do the files that they have left, of this attempt if there are two."""
    guilty = 0 if played["kind"] == "all" else played["rank"]
    for rank in range(world_size):
        mine = [entry for entry in told if entry["rank"] == rank]
        assert mine, f"rank {rank} of {played} said nothing"
        for entry in mine:
            words = entry["said"]
            match = _GUILTY.search(words)
            assert match is not None, words
            assert (match[1] == "the root module") is (played["kind"] == "data")
            if played["kind"] == "all":
                assert match[3] == str(world_size), (played, words)
            else:
                assert match[2] == str(guilty), (played, words)
            if entry.get("origin"):
                assert entry["origin"][0] == guilty
                assert entry["origin"][4] == (world_size if played["kind"] == "all" else 1)
                assert entry["is_peer"] is (not (played["kind"] == "all" or rank == guilty)) or (
                    # where it may have come through a collective first
                    played["way"] in ("tp", "fsdp2", "stages") or played["kind"] == "backward"
                )
    merged = merge(folder)
    if attempt is not None:
        merged = next(entry for entry in (merged, *merged.others) if entry.attempt.number == attempt)
    assert merged.origins[0].rank == guilty
    assert [digest.rank for digest in merged.digests] == list(range(world_size))


def test_data_parallel_and_pipelined_jobs_name_the_guilty_rank(tmp_path):
    """Faults, one after another in the same processes: each has a verdict, and the group can be destroyed."""
    world_size = 3
    scenarios = [*each_kind("ddp", world_size), *each_kind("pipeline", world_size)]
    told = run(scenarios, world_size, tmp_path)
    for number, played in enumerate(scenarios):
        mine = [entry for entry in told if entry["scenario"] == number]
        assert sum("is_destroyed" in entry for entry in mine) == world_size
        check(played, mine, world_size, tmp_path / str(number))


@pytest.mark.parametrize(
    ("world_size", "way", "number"), [(2, "fsdp2", 1), (2, "tp", 0), (4, "fsdp2", 2), (4, "stages", 1)]
)
def test_sharded_jobs_name_the_guilty_rank(world_size, way, number, tmp_path):
    """The process that raises ends, and torchrun then ends the others: by then each has told the origin."""
    played = each_kind(way, world_size)[number] | {"exits": True}
    check(played, run([played], world_size, tmp_path), world_size, tmp_path / "0")


def test_a_rank_that_is_killed_once_it_has_told_is_still_the_origin(tmp_path):
    """Without a launcher the others live on: they raise what the dead one found."""
    played = scenario("ddp", "module", 1, exits=True, dies=True)
    given = tmp_path / "scenarios.json"
    given.write_text(json.dumps([played]))
    ranks = run_ranks(3, [str(_SCRIPT), str(given), str(tmp_path)], 120)
    assert ranks[1].returncode == -signal.SIGKILL
    for done in (ranks[0], ranks[2]):
        told = told_by(done)
        errors = [entry["error"] for entry in told if "error" in entry]
        assert errors == ["PeerNonFiniteError"], done.stderr[-2000:]
        assert told[-1]["origin"][:2] == [1, "1.down"]
        assert done.returncode == 1


@pytest.mark.parametrize(("world_size", "way", "count"), [(3, "ddp", 2), (2, "fsdp2", 1)])
def test_a_backward_that_overflows_on_one_rank_is_that_ranks(world_size, way, count, tmp_path):
    """In half precision. The all-reduce hands it to the others, who step and hear of it, or see it, a batch later."""
    scenarios = [
        scenario(way, "backward", (number + 1) % world_size, 2 + number, exits=way == "fsdp2")
        for number in range(count)
    ]
    told = run(scenarios, world_size, tmp_path)
    for number, played in enumerate(scenarios):
        mine = [entry for entry in told if entry["scenario"] == number]
        check(played, mine, world_size, tmp_path / str(number))
        origins = [entry["origin"] for entry in mine if entry.get("origin")]
        assert [entry[:3] for entry in origins] == [[played["rank"], "1.down", "produced"]] * world_size
        assert {entry[3] for entry in origins} in ({"input[0].grad"}, {"weight.grad"})


@pytest.mark.parametrize("second", ["healthy", "data"])
def test_the_second_attempt_of_an_elastic_job_has_its_own_verdict(second, tmp_path):
    """The second attempt trains to its end, or fails elsewhere and says so: nothing is left of the first one's failure.

    Both write into one folder, and a merge tells them apart.
    """
    given = {"port": None, "folder": "run"}
    first = scenario("ddp", "module", 1, exits=True, attempt=0) | given
    then = scenario("ddp", second, 0, 5, exits=second != "healthy", attempt=1) | given
    folder = tmp_path / "run"
    told = run([first, then], 2, tmp_path, "--max_restarts=1", "--standalone")
    check(first, [entry for entry in told if entry["scenario"] == 0], 2, folder, 0)
    latest = merge(folder)
    again = [entry for entry in told if entry["scenario"] == 1]
    if second == "healthy":
        assert [entry["error"] for entry in again] == [None, None]
        assert (latest.attempt.number, latest.others) == (0, ())
        assert sorted(path.name for path in folder.glob("*-rank-*")) == ["batch-3-rank-1", "peer-rank-0"]
    else:
        check(then, again, 2, folder, 1)
        assert (latest.attempt.number, [entry.attempt.number for entry in latest.others]) == (1, [0])
        assert len(list(folder.rglob("report.json"))) == 4
        assert [entry["origin"][:3] for entry in again if entry.get("origin")] == [[0, "", "data"]] * 2
