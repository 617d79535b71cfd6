"""Training in the ways that torch makes parallel, with real ranks: bit-equal, and stopped on all ranks at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from support.netcheck_ranks import run_ranks
from support.paths import SCRIPTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]

_SECONDS = 480  # on a machine that does ten other things; alone two cores take one


@pytest.mark.parametrize(
    ("size", "scenarios"), [(2, ["ddp", "pipeline", "fsdp2_written", "steps"]), (4, ["both"])]
)
def test_a_parallel_job_is_watched(size: int, scenarios: list[str], tmp_path: Path) -> None:
    """Each rank plays the scenarios one after the other. The asserts are in the script."""
    command = [str(SCRIPTS / "parallel_job.py"), str(tmp_path / "store"), *scenarios]
    for rank, done in enumerate(run_ranks(size, command, _SECONDS)):
        assert done.returncode == 0, f"rank {rank}: {done.stderr[-2000:]}"
