"""Checkpoints that several ranks write together: none writes when one refuses."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from support.paths import SCRIPTS
from support.processes import environment


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    ("policy", "how", "guards", "ends"),
    [
        ("warn", "now", "both", ["returned", "returned"]),
        ("raise", "THREAD", "both", ["CheckpointException", "NonFiniteError"]),
        ("raise", "PROCESS", "both", ["CheckpointException", "NonFiniteError"]),
        ("warn", "now", "second", ["CheckpointException", "returned"]),
    ],
)
def test_no_rank_writes_where_one_refuses(tmp_path, policy, how, guards, ends):
    script = str(SCRIPTS / "guarded_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(number), str(tmp_path), policy, how, guards],
            env=environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=300)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == [[end, "True"] for end in ends]
    assert not (tmp_path / "model.nonfinite").exists()
