"""Real ranks whose replicas part: benchmarks/judge_replicas.py with a few of its trainings."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from support.netcheck_ranks import rank_environment
from support.paths import BENCHMARKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]


def test_flips_are_named_and_healthy_trainings_say_nothing() -> None:
    """In DDP, HSDP, ZeRO-1 and tensor parallelism, as the judge's status says."""
    command = [sys.executable, str(BENCHMARKS / "judge_replicas.py"), "--healthy", "4", "--flips", "8"]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "told: " in done.stdout
