"""The few keys by which ranks compare digests, and the judgement of what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from nanwatch.ranks.replica_store import ReplicaProtocol, Side, digest, judge
from nanwatch.ranks.replicas import Print


class Counting:
    """A store that counts its messages."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.messages = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.messages += 1
            return method(*args)

        return call


def protocols(size: int) -> tuple[Counting, list[ReplicaProtocol]]:
    store = Counting()
    return store, [ReplicaProtocol(store, rank, size) for rank in range(size)]


def weights(*values: int) -> dict[str, Print]:
    return {f"{i}.weight": Print("weight", value) for i, value in enumerate(values)}


def test_a_healthy_check_is_one_message_a_rank_and_leaves_nothing_behind() -> None:
    """The keys of a hundred checks are those of eight."""
    store, ranks = protocols(4)
    keys = []
    for check in range(1, 101):
        before = store.messages
        assert all(rank.post(check, f"digest of {check}") for rank in ranks)
        # Only the first to come may have to ask for what is in its slot.
        assert store.messages - before <= 5
        keys.append(store._store.num_keys())
    assert keys[-1] == keys[20]
    assert [rank.difference() for rank in ranks] == [None] * 4


@pytest.mark.parametrize("odd", range(3))
def test_another_digest_is_heard_of_by_all(odd: int) -> None:
    """Also when the odd rank came first, and then the others see it."""
    _, ranks = protocols(3)
    agree = [rank.post(4, "odd" if number == odd else "even") for number, rank in enumerate(ranks)]
    assert agree == ([True, False, False] if odd == 0 else [number != odd for number in range(3)])
    ranks[agree.index(False)].tell_difference(4)
    ranks[-1].tell_difference(5)  # later: the first counts
    assert [rank.difference() for rank in ranks] == [4, 4, 4]


def test_checks_that_are_far_apart_are_not_compared() -> None:
    """A rank that comes nine checks late finds a newer one in its slot."""
    _, (fast, slow) = protocols(2)
    for check in range(1, 10):
        assert fast.post(check, "a")
    assert slow.post(1, "b")
    assert not slow.post(9, "b")


def test_one_rank_judges_for_all_and_the_next_difference_begins_anew() -> None:
    """Whichever reports last, or loses patience first."""
    import json

    _, ranks = protocols(3)
    for turn in range(2):
        prints = [weights(1, 2 + (number == 1 - turn)) for number in range(3)]
        complete = [
            rank.report(digest(own, set()), own, f"host-{number}")
            for number, (rank, own) in enumerate(zip(ranks, prints, strict=True))
        ]
        assert complete == [False, False, True]
        for rank in ranks:
            rank.judge()
        verdicts = [rank.get("verdict") for rank in ranks]
        assert len(set(verdicts)) == 1
        found = json.loads(verdicts[0] or b"")
        assert (found["names"], found["ranks"], found["hosts"]) == (
            ["1.weight"],
            [1 - turn],
            [f"host-{1 - turn}"],
        )
        for rank in ranks:
            rank.end()


def side(first: int, count: int, prints: dict[str, Print]) -> Side:
    return Side(count, [(first + i, "host") for i in range(min(count, 8))], prints)


def test_the_majority_holds_the_truth() -> None:
    """Of those that answered; the odd ranks are those of the first tensor that differs."""
    found = judge([side(0, 1, weights(1, 9, 3)), side(1, 5, weights(1, 2, 3)), side(6, 1, weights(1, 2, 8))])
    assert (found["names"], found["ranks"], found["num_ranks"]) == (["1.weight", "2.weight"], [0], 7)
    assert (found["is_majority"], found["pair"]) == (True, [0, 1])


def test_two_ranks_have_no_majority() -> None:
    """So both are named."""
    found = judge([side(0, 1, weights(1)), side(4, 1, weights(2))])
    assert (found["is_majority"], found["ranks"]) == (False, [0, 4])


def test_tensors_that_not_all_have_are_not_compared() -> None:
    """As the states of an optimizer that is shared out; nor is a rank that answers alone."""
    ranks = [
        side(0, 1, weights(1) | {"a": Print("state", 1)}),
        side(1, 1, weights(1) | {"b": Print("state", 2)}),
    ]
    assert judge(ranks)["names"] == []
    assert judge([side(0, 1, weights(1))])["names"] == judge([])["names"] == []


@pytest.mark.parametrize(
    ("odd", "is_told"),
    [
        (Print("buffer", 9, is_kept=False, writes=0), True),
        (Print("buffer", 9, is_kept=False, writes=1), False),  # the program wrote it, on this rank alone
        (Print("buffer", 9, is_kept=True, writes=0), False),  # it has always been another one here
    ],
)
def test_a_buffer_is_told_only_when_it_changed_by_itself(odd: Print, is_told: bool) -> None:
    """Running statistics and buffers that a rank fills by itself are its own."""
    found = judge([side(0, 3, {"table": Print("buffer", 1)}), side(3, 1, {"table": odd})])
    assert (found["names"], found["own"]) == ((["table"], []) if is_told else ([], ["table"]))


def test_buffers_that_change_in_every_batch_are_in_no_digest() -> None:
    """Nor is what is known to differ."""
    own = weights(1, 2)
    changing = {"running": Print("buffer", 5, is_kept=False)}
    assert digest(own | changing, set()) == digest(own, set())
    assert digest(own | {"table": Print("buffer", 5)}, set()) != digest(own, set())
    assert digest(weights(1, 3), {"1.weight"}) == digest(own, {"1.weight"}) != digest(own, set())
