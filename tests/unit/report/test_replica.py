"""A difference between replicas in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanwatch.report.replica import Distance, ReplicaDifference

ONE = ReplicaDifference(
    20, 10, ("0.weight",), 1, (3,), 1, ("node-7",), 8, 8, is_majority=True, pair=(3, 0), batch=21
)
APART = Distance(23, 1, 4096, 0.5, (20, 21))


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (ONE, ["step 20", "0.weight on rank 3 (node-7)", "7 other ranks", "after step 10"]),
        (replace(ONE, num_tensors=4), ["0.weight and 3 more tensors"]),
        (replace(ONE, num_odd=12), ["on 12 ranks"]),
        (replace(ONE, num_ranks=6), ["5 other ranks", "2 of 8 ranks did not answer"]),
        (replace(ONE, began=17), ["first seen in batch 17, after step 10"]),
        (replace(ONE, distance=APART), ["1 of 4,096 elements differs", "0.5", "bit 20-21", "at step 23"]),
        (replace(ONE, distance=replace(APART, num_differing=9, is_all=False)), ["at least 9", "differ,"]),
        (replace(ONE, files=("run/rank-3.pt",)), ["bytes in run/rank-3.pt"]),
        (
            replace(ONE, ranks=(0, 3), num_odd=2, num_ranks=2, size=2, hosts=("a", "b"), is_majority=False),
            ["on one of rank 0, 3 (a, b); no majority"],
        ),
    ],
)
def test_the_sentence_has_the_facts(difference: ReplicaDifference, words: list[str]) -> None:
    """As far as they are known; with two ranks nobody is accused."""
    assert [word for word in words if word not in str(difference)] == [], str(difference)
