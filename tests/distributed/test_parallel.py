"""Training in the ways that torch makes parallel, with real ranks: bit-equal, no collective more, the user's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from filelock import FileLock

from support.netcheck_ranks import run_ranks
from support.paths import SCRIPTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]

_SECONDS = 480  # on a machine that does ten other things; alone two cores take one
# What each rank of a job of that size does, one after the other; the asserts are in the script.
SCENARIOS = {
    2: ["ddp", "pipeline", "fsdp2_written"],
    4: ["both"],
}


def run_job(folder: Path, size: int) -> list[dict[str, str]]:
    """Return for each rank the error of each scenario, "" where it has none."""
    command = [str(SCRIPTS / "parallel_job.py"), str(folder / f"store-{size}"), *SCENARIOS[size]]
    errors = []
    for rank, done in enumerate(run_ranks(size, command, _SECONDS)):
        assert done.stdout.strip(), f"rank {rank} ended with {done.returncode}: {done.stderr[-2000:]}"
        errors.append(json.loads(done.stdout.splitlines()[-1]))
    return errors


@pytest.fixture(scope="module")
def jobs(folder_of_all: Path) -> dict[int, list[dict[str, str]]]:
    """One job of two ranks and one of four, by the first test process that asks: they take a minute of all cores."""
    folder = folder_of_all / "parallel"
    done = folder / "errors.json"
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            folder.mkdir(exist_ok=True)
            done.write_text(json.dumps([run_job(folder, size) for size in SCENARIOS]), encoding="utf-8")
    return dict(zip(SCENARIOS, json.loads(done.read_text(encoding="utf-8")), strict=True))


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SCENARIOS for name in SCENARIOS[size]])
def test_a_parallel_job_is_watched(jobs: dict[int, list[dict[str, str]]], size: int, name: str) -> None:
    for rank, errors in enumerate(jobs[size]):
        assert name in errors, f"rank {rank} did not come to {name}: {errors}"
        assert not errors[name], f"rank {rank}: {errors[name]}"
