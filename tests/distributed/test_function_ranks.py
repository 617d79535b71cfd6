"""A function as `on_nonfinite` in a job of two ranks: each report carries the verdict, and the training goes on."""

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


def test_the_function_gets_the_verdict_and_the_training_goes_on(tmp_path):
    """The verdict is the first non-finite output that plain forward hooks saw in the unwatched training.

    One rank fails, then the other, then both, then one whose step poisons the weights of both.
    """
    done = run_ranks(2, [str(SCRIPTS / "function_ranks.py"), str(tmp_path / "store")], 120)
    assert [one.returncode for one in done] == [0, 0], [one.stderr[-2000:] for one in done]
    ranks = [json.loads(one.stdout) for one in done]
    assert all(one["is_equal"] for one in ranks)
    # The failures in a row, each with the ranks on which hooks saw it first.
    firsts: dict[int, list[list[object]]] = {}
    for rank, one in enumerate(ranks):
        by_batch = {}
        for batch, module in one["seen"]:
            by_batch.setdefault(batch, module)
        for batch, module in by_batch.items():
            firsts.setdefault(batch, []).append([rank, batch, module])
    assert sorted(firsts) == [1, 3, 5, 7, 8, 9]
    runs = {batch: batch if batch < 7 else 7 for batch in firsts}
    for rank, one in enumerate(ranks):
        calls = one["calls"]
        assert [call[0] for call in calls] == sorted(
            batch for batch, seen in firsts.items() if rank in [it[0] for it in seen]
        )
        for batch, verdict, is_examined, is_in_text in calls:
            first = firsts[runs[batch]]
            assert verdict == [*first[0], len(first), True]
            assert is_in_text
            assert is_examined or batch > 7  # the weights that a bad step left need no operation
