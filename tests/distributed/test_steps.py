"""A step of two ranks, one of which has made a gradient non-finite: no rank takes it, and each names that rank."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from support.netcheck_ranks import run_ranks
from support.paths import SCRIPTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
    ),
]


def test_no_rank_takes_a_step_that_another_does_not_take(tmp_path):
    """DistributedDataParallel in its forms, ZeRO-1 and FSDP2 give each rank the nan; one shard's inf is told of."""
    done = run_ranks(2, [str(SCRIPTS / "step_ranks.py"), str(tmp_path / "store")], 240)
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr[-2000:] for rank in done]
    first, second = (json.loads(rank.stdout) for rank in done)
    assert second == [["NonFiniteError", 1, True]] * 8
    assert first == [["NonFiniteError", 1, True]] * 7 + [["PeerNonFiniteError", 1, True]]
