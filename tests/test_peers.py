"""A watch in a job of several ranks: whichever fails, every rank says where it was first, and none hangs."""

from __future__ import annotations

import gc
import json
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nanwatch
from nanwatch import peers, verdict
from nanwatch.board import Board, attempt
from nanwatch.merge import merge
from nanwatch.peers import Peers
from nanwatch.sighting import Sighting
from nanwatch.verdict import PeerNonFiniteError
from netcheck_ranks import environment, free_port, run_ranks
from sightings import connect, finding, serve

_SCRIPT = Path(__file__).with_name("rank_scenarios.py")
_GUILTY = re.compile(
    r"first seen in `\S+` of (\S+) \(\w+\) in batch \d+ on (?:rank (\d+)|(?:all )?(\d+) ranks)"
)

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


def scenario(way: str, kind: str, rank: int, batch: int = 3, **more: Any) -> dict[str, Any]:
    return {"way": way, "kind": kind, "rank": rank, "batch": batch, "port": free_port(), **more}


def random_scenarios(ways: tuple[str, ...], world_size: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Each way in turn; what happens, where and when is drawn."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        way = ways[number % len(ways)]
        # A batch of a pipeline begins in its first stage, and its stages never fail at once.
        kinds = ["module", "data", "straggler", "all"]
        kind = draw.choice(kinds[:3] if way == "pipeline" else kinds)
        rank = 0 if way == "pipeline" and kind == "data" else draw.randrange(world_size)
        if kind == "data" and way == "tp":
            kind = "module"  # its ranks share their data
        check = draw.choice(["auto", "batch"])
        found.append(scenario(way, kind, rank, draw.randrange(1, 6), check=check))
    return found


def told_by(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run(scenarios: list[dict[str, Any]], world_size: int, folder: Path) -> list[dict[str, Any]]:
    """What the ranks print, under torchrun."""
    given = folder / "scenarios.json"
    given.write_text(json.dumps(scenarios))
    line = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world_size}", "--master_port"]
    done = subprocess.run(
        [*line, str(free_port()), str(_SCRIPT), str(given), str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60 + 30 * len(scenarios),
    )
    assert done.returncode == int(bool(scenarios[-1].get("exits"))), done.stderr[-3000:]
    told = told_by(done)
    assert told, done.stderr[-3000:]
    return told


def check(played: dict[str, Any], told: list[dict[str, Any]], world_size: int, folder: Path) -> None:
    """All ranks name the guilty one, in time; so do the files that they have left."""
    guilty = 0 if played["kind"] == "all" else played["rank"]
    for rank in range(world_size):
        mine = [one for one in told if one["rank"] == rank]
        assert mine, f"rank {rank} of {played} said nothing"
        for one in mine:
            words = one["said"]
            found = _GUILTY.search(words)
            assert found is not None, words
            assert found[1] == ("up" if played["way"] == "pipeline" else "0.up") or played["kind"] != "data"
            if played["kind"] == "all":
                assert found[3] == str(world_size), (played, words)
            else:
                assert found[2] == str(guilty), (played, words)
            if one.get("origin"):
                assert one["origin"][0] == guilty
                assert one["origin"][4] == (world_size if played["kind"] == "all" else 1)
                assert one["seconds"] < 30
                assert one.get("destroyed_in", 0) < 30
                assert one["is_peer"] is (not (played["kind"] == "all" or rank == guilty)) or (
                    played["way"] in ("tp", "fsdp2")  # where it may have come through a collective first
                )
    merged = merge(folder)
    assert merged.origins[0].rank == guilty
    assert merged.ranks == list(range(world_size))


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "count"), [(2, 10), (4, 4)])
def test_data_parallel_and_pipelined_jobs_name_the_guilty_rank(world_size, count, tmp_path):
    """Random faults, one after another in the same processes: each has a verdict, and the group can be destroyed."""
    scenarios = random_scenarios(("ddp", "pipeline"), world_size, count, seed=world_size)
    told = run(scenarios, world_size, tmp_path)
    for number, played in enumerate(scenarios):
        mine = [one for one in told if one["scenario"] == number]
        assert sum("destroyed_in" in one for one in mine) == world_size
        check(played, mine, world_size, tmp_path / str(number))


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "way", "seed"),
    [(2, "fsdp2", 0), (2, "fsdp2", 1), (2, "tp", 2), (2, "tp", 3), (4, "fsdp2", 4), (4, "tp", 5)],
)
def test_sharded_jobs_name_the_guilty_rank(world_size, way, seed, tmp_path):
    """The process that raises ends, and torchrun then ends the others: by then each has told the origin."""
    played = random_scenarios((way,), world_size, 1, seed)[0] | {"exits": True}
    check(played, run([played], world_size, tmp_path), world_size, tmp_path / "0")


@needs_gloo
@pytest.mark.slow
def test_a_rank_that_is_killed_once_it_has_told_is_still_the_origin(tmp_path):
    """Without a launcher the others live on: they raise what the dead one found."""
    played = scenario("ddp", "module", 1, exits=True, dies=True)
    given = tmp_path / "scenarios.json"
    given.write_text(json.dumps([played]))
    ranks = run_ranks(3, [str(_SCRIPT), str(given), str(tmp_path)], 120)
    assert ranks[1].returncode == -signal.SIGKILL
    for done in (ranks[0], ranks[2]):
        told = told_by(done)
        assert [one["error"] for one in told if "error" in one] == ["PeerNonFiniteError"], done.stderr[-2000:]
        assert told[-1]["origin"][:2] == [1, "1.down"]
        assert done.returncode == 1


def verdict_threads() -> int:
    return sum(thread.name == "nanwatch verdict" for thread in threading.enumerate())


def test_a_process_alone_asks_nobody(one_process_mesh):
    """No thread, no hook, and an error without an origin: neither without a process group nor in one of one rank."""
    hook = sys.excepthook
    model = nn.Linear(4, 4)
    with pytest.raises(nanwatch.NonFiniteError) as caught, nanwatch.watch(model, microscope=False):
        model(torch.full((2, 4), float("inf")))
    assert caught.value.origin is None
    assert (verdict_threads(), sys.excepthook) == (0, hook)


class Job:
    """A job of two as one of its ranks sees it: the other one is a Board on the same store."""

    def __init__(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.group = type("Group", (), {})()
        monkeypatch.setattr(peers, "_group", lambda: self.group)
        monkeypatch.setattr(peers, "place", lambda: (0, 2))
        monkeypatch.setattr(verdict, "_default_store", lambda: connect(server))

    def other_fails(self) -> None:
        """Rank 1 has told and has had its say."""
        store = dist.PrefixStore(
            f"nanwatch/verdict/{attempt({})}/{peers._job._num_verdicts}", connect(self.server)
        )
        board = Board(store, 2)
        board.publish(Sighting.of(finding(batch=1, module="there", rank=1), 1, 3, (0, 1), ""))
        board.report()
        board.leave()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of two, rank 1 of which does what it is told."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return Job(serve(), monkeypatch)


def until_told(model: nn.Module) -> None:
    """Batches until another rank's failure ends one; at most about 20 s."""
    for _ in range(400):
        model(torch.ones(2, 4))
        threading.Event().wait(0.05)


def test_the_next_batch_raises_what_another_rank_found(job, tmp_path):
    """With this rank's own frames, which are written down; and so does the batch after the next failure."""
    model = nn.Linear(4, 4)
    watch = nanwatch.watch(model, output_dir=tmp_path, peer_timeout=10)
    for _ in range(2):
        job.other_fails()
        with pytest.raises(PeerNonFiniteError, match=r"of there \(Linear\) in batch 1 on rank 1") as caught:
            until_told(model)
        assert caught.value.report.finding is None
        assert caught.value.report.frames
    watch.stop()
    assert verdict_threads() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peer-rank-0", "peer-rank-0.2"]
    assert nanwatch.Report.from_json((tmp_path / "peer-rank-0" / "report.json").read_text()).finding is None


def test_an_error_of_a_collective_inside_a_forward_is_explained(job):
    """RuntimeError of a peer that has gone: the failure of that peer is raised from it."""

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            job.other_fails()
            raise RuntimeError("Connection closed by peer")

    model = Waiting()
    with (
        nanwatch.watch(model, peer_timeout=10),
        pytest.raises(PeerNonFiniteError, match="on rank 1") as caught,
    ):
        model(torch.ones(2, 4))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_a_collective_outside_any_forward_is_explained(job):
    """The end of the `with` and, without one, the hook of uncaught exceptions see it."""
    model = nn.Linear(4, 4)

    def train() -> None:
        with nanwatch.watch(model, peer_timeout=10):
            model(torch.ones(2, 4))
            job.other_fails()
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(PeerNonFiniteError, match="on rank 1"):
        train()
    shown: list[BaseException] = []
    before, sys.excepthook = sys.excepthook, lambda kind, error, traceback: shown.append(error)
    try:
        watch = nanwatch.watch(model, peer_timeout=10)
        model(torch.ones(2, 4))
        job.other_fails()
        ended = RuntimeError("Connection closed by peer")
        sys.excepthook(RuntimeError, ended, None)
        watch.stop()
    finally:
        sys.excepthook = before
    assert [type(error) for error in shown] == [PeerNonFiniteError]
    assert shown[0].__cause__ is ended


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt(), RuntimeError("a bug")])
def test_other_errors_are_what_they_were(job, error):
    """Nobody has failed elsewhere: a user's own error leaves the forward and the `with` as it is."""

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    model = Broken()
    with pytest.raises(type(error)) as caught, nanwatch.watch(model, peer_timeout=10):
        model(torch.ones(2, 4))
    assert caught.value is error
    assert error.__cause__ is None
    assert verdict_threads() == 0


def test_without_peer_timeout_each_rank_speaks_for_itself(job):
    """No thread, and nothing is asked."""
    model = nn.Linear(4, 4)
    with nanwatch.watch(model, peer_timeout=0):
        model(torch.ones(2, 4))
        assert verdict_threads() == 0


@pytest.mark.parametrize(
    ("given", "error"), [(-1, ValueError), (float("nan"), ValueError), ("30", TypeError), (True, TypeError)]
)
def test_a_peer_timeout_that_means_nothing_is_refused(given, error):
    """With what was given and what is accepted."""
    with pytest.raises(error, match=r"peer_timeout should be .* seconds.*got"):
        nanwatch.watch(nn.Linear(2, 2), peer_timeout=given)


def test_a_watch_that_is_dropped_ends_its_thread(job):
    """Nobody has to call stop()."""
    model = nn.Linear(4, 4)
    watch = nanwatch.watch(model, peer_timeout=10)
    model(torch.ones(2, 4))
    assert verdict_threads() == 1
    del watch, model
    gc.collect()
    assert verdict_threads() == 0


def test_clocks_count_steps_and_batches_since(job):
    """So that a rank that validates in between counts like the others after its next step."""
    model = nn.Linear(4, 4)
    mine = Peers(model, 10.0, lambda name: nanwatch.Report((), None, None))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for batch, steps in enumerate((False, True, False, False, True, False)):
        mine.batch_started(batch)
        seen.append(mine._clock(batch))
        if steps:
            optimizer.step()
    mine.close()
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert [mine._clock(batch) for batch in (0, 3, 5)] == [(0, 0), (1, 1), (2, 0)]
