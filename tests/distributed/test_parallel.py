"""Training in the ways that torch makes parallel, with real ranks: bit-equal, no collective more, the user's names."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from filelock import FileLock

from support.netcheck_ranks import run_ranks
from support.parallel_models import NAMES
from support.paths import SCRIPTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]

_JOB = SCRIPTS / "parallel_job.py"
_SECONDS = 480  # on a machine that does ten other things; alone two cores take one
TRAINED = {2: ["ddp", "fsdp2", "tensor_parallel"], 4: ["both"]}
OTHERS = {2: ["pipeline", "fsdp2_written", "fsdp2_bad_gradient", "places"], 4: ["places"]}


def run_job(folder: Path, size: int) -> list[dict[str, Any]]:
    """Return the results of each rank of one job in all scenarios."""
    command = [str(_JOB), str(folder / f"store-{size}"), *TRAINED[size], *OTHERS[size]]
    seen = []
    for rank, done in enumerate(run_ranks(size, command, _SECONDS)):
        assert done.stdout.strip(), f"rank {rank} ended with {done.returncode}: {done.stderr[-2000:]}"
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    return seen


@pytest.fixture(scope="module")
def jobs(folder_of_all: Path) -> dict[int, list[dict[str, Any]]]:
    """One job of two ranks and one of four, by the first test process that asks: they take a minute of all cores."""
    folder = folder_of_all / "parallel"
    done = folder / "seen.json"
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            folder.mkdir(exist_ok=True)
            done.write_text(json.dumps([run_job(folder, size) for size in (2, 4)]), encoding="utf-8")
    return dict(zip((2, 4), json.loads(done.read_text(encoding="utf-8")), strict=True))


def seen_by_all(jobs: dict[int, list[dict[str, Any]]], size: int, name: str) -> list[dict[str, Any]]:
    for rank, saw in enumerate(jobs[size]):
        for done, what in saw.items():
            assert "error" not in what, f"rank {rank} in {done}: {what['error']}"
        assert name in saw, f"rank {rank} did not come to {name}"
    return [saw[name] for saw in jobs[size]]


CASES = [(size, name) for size, listed in TRAINED.items() for name in listed]


@pytest.mark.parametrize(("size", "name"), CASES)
def test_watched_training_is_bit_equal_and_sends_no_more(jobs: Any, size: int, name: str) -> None:
    """Watched before and after the model is made parallel, with gradients and without: same weights, same traffic."""
    for saw in seen_by_all(jobs, size, name):
        assert saw.pop("collectives") > 0  # or the counting would see nothing
        assert sum(saw.pop("events").values()) > 0
        assert len(saw) == 4
        for when, one in saw.items():
            assert one["equal"], when
            assert set(one["more"]) == {0}, when
            assert one["same events"], when
            assert not one["finding"], when
            assert one["batches"] == 2
            assert one["stale"] == 0
            assert one["same report"]


@pytest.mark.parametrize(("size", "name"), CASES)
def test_frames_have_the_users_names(jobs: Any, size: int, name: str) -> None:
    """In forward and backward, whatever was put around or into the model."""
    expected = (
        sorted([*(f"net.{part}" if part else "net" for part in NAMES), "norm", ""])
        if name == "ddp"
        else NAMES
    )
    for saw in seen_by_all(jobs, size, name):
        for when in ("before", "after"):
            assert saw[f"{when}, gradients=False"]["names"] == expected
            assert saw[f"{when}, gradients=True"]["names"] == expected
            assert saw[f"{when}, gradients=True"]["backward names"] == expected


def places_in_the_mesh(size: int, name: str, rank: int) -> list[str]:
    """Return the place of a rank in the mesh, as init_device_mesh arranges ranks row by row."""
    if name == "ddp":  # it has no mesh of its own
        return []
    if name == "both":
        return [f"dp={rank // 2} of 2", f"tp={rank % 2} of 2"]
    return [f"{'tp' if name.endswith('_parallel') else 'dp'}={rank} of {size}"]


@pytest.mark.parametrize(("size", "name"), CASES)
def test_reports_say_where_the_rank_is_in_the_mesh(jobs: Any, size: int, name: str) -> None:
    """Also where every weight in the frames was gathered, so that no frame has a shard."""
    for rank, saw in enumerate(seen_by_all(jobs, size, name)):
        for when in ("before", "after"):
            for gradients in (False, True):
                assert saw[f"{when}, gradients={gradients}"]["mesh"] == places_in_the_mesh(size, name, rank)


def test_stages_of_a_pipeline(jobs: Any) -> None:
    """Each rank has the frames of its own stage; what goes between them is what went before.

    The call on memory that was never written, here filled with nan, by which a stage learns its shapes is no batch.
    """
    expected = [["", "0", "0.down", "0.norm", "0.up"], ["", "0", "0.down", "0.norm", "0.up", "1"]]
    for rank, saw in enumerate(seen_by_all(jobs, 2, "pipeline")):
        assert saw["stage"] == rank
        assert saw["events"]["gloo:send"] == saw["events"]["gloo:recv"] > 0
        for when, gradients in product(("before", "after"), (False, True)):
            one = saw[f"{when}, gradients={gradients}"]
            assert one["equal"]
            assert set(one["more"]) == {0}
            assert one["same events"]
            assert one["names"] == expected[saw["stage"]]
            assert one["backward names"] == (expected[saw["stage"]] if gradients else [])
            assert one["read"] == [True]
            assert not one["finding"]
            assert one["batches"] == 5  # two microbatches a step
            assert one["stale"] == 0


def test_weights_written_to_a_sharded_model_are_seen(jobs: Any) -> None:
    """FSDP gathers into the same storage past the version counter: the next batch reads what is there."""
    for saw in seen_by_all(jobs, 2, "fsdp2_written"):
        assert saw["stale"] == 0
        for first, second, third in saw["seen"]:
            assert (second, third) == (2 * first, 4 * first)


def test_a_bad_gradient_that_fsdp_reduced_is_stopped(jobs: Any) -> None:
    """One weight's gradient overflows on one rank, and is reduced past all hooks: neither rank takes the step."""
    for saw in seen_by_all(jobs, 2, "fsdp2_bad_gradient"):
        assert saw["labels"] == ["output.grad"]  # that is: the hooks did not see it
        assert saw["seen"] == ["stepped", ["head", "weight.grad", "step", 1, True]]


@pytest.mark.parametrize("size", [2, 4])
def test_the_bad_element_is_named_in_the_whole_tensor(jobs: Any, size: int) -> None:
    """The place that the report names is where a gather of the shards has the bad value, even and uneven."""
    for saw in seen_by_all(jobs, size, "places"):
        told = [one for one in saw["seen"] if one["cut"] and not one["empty"]]
        assert len(told) >= 6 * size // 2
        for one in told:
            assert one["bad in the whole"]
            assert one["says so"]
            assert [one["value there"]] == one["last of the shard"]
            assert one["start"] == one["start by torch"]
            assert one["shape"]
        for one in saw["seen"]:
            assert one["start"] is None or one["cut"]
