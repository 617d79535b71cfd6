"""The few keys by which ranks compare values: what is sent, when a difference is heard of, and by whom it is judged."""

import time
from typing import Any

import pytest
import torch.distributed as dist

from nanwatch.ranks.exchange import _Check, _Group
from nanwatch.ranks.replicas import judge


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


def groups(size: int, timeout: float = 30.0) -> tuple[Counting, list[_Group]]:
    store = Counting()
    return store, [_Group(store, size, judge, timeout) for _ in range(size)]


def check(number: int, *values: int) -> _Check:
    return _Check(number, {f"{i}.weight": value for i, value in enumerate(values)}, {})


def test_a_healthy_check_is_one_message_a_rank_and_leaves_nothing_behind() -> None:
    """The keys of a hundred checks are those of eight."""
    store, ranks = groups(4)
    keys = []
    for number in range(1, 101):
        before = store.messages
        for rank in ranks:
            rank.add(check(number, 1, number))
        # Only the first to come may have to ask for what is in its slot.
        assert store.messages - before <= 5
        keys.append(store._store.num_keys())
    assert keys[-1] == keys[20]
    assert [rank.look() for rank in ranks] == [None] * 4


@pytest.mark.parametrize("odd", range(3))
def test_all_ranks_hear_the_same_verdict_and_go_on(odd: int) -> None:
    """Whichever rank is odd. What differed is left out from then on, and another difference is heard of."""
    _, ranks = groups(3)
    for number, rank in enumerate(ranks):
        rank.add(check(1, 1, 2 + (number == odd), 3))
    for number, rank in enumerate(ranks):
        rank.add(check(2, 1, 7 + number, 3))
    verdicts = {}
    for _ in range(3):  # a rank that asks before all have reported asks again at its next step
        for number, rank in enumerate(ranks):
            verdicts[number] = verdicts.get(number) or rank.look()
    assert len({str(verdict) for verdict in verdicts.values()}) == 1
    assert (verdicts[0][0], verdicts[0][1]["names"]) == (1, ["1.weight"])
    assert (verdicts[0][1]["num_odd"], verdicts[0][1]["is_majority"]) == (1, True)
    assert [rank.look() for rank in ranks] == [None] * 3
    for number, rank in enumerate(ranks):
        rank.add(check(3, 1, 7, 3 + (number == 0)))
    assert [rank.look() for rank in ranks][-1][1]["names"] == ["2.weight"]


def test_ranks_that_do_not_answer_are_waited_for_only_so_long() -> None:
    _, (first, second, _) = groups(3, timeout=0.05)
    first.add(check(1, 1))
    second.add(check(1, 2))
    assert [first.look(), second.look()] == [None, None]
    time.sleep(0.06)
    verdict = first.look()
    assert verdict == second.look()
    assert verdict[1]["num_ranks"] == 2


def test_ranks_have_left_only_when_none_waits_for_a_verdict() -> None:
    """A rank that left before it heard of a difference posts its later checks again, and leaves again after these."""
    _, (first, second) = groups(2)
    first.add(check(1, 1))
    second.leave()
    second.add(check(1, 2))
    first.look()
    first.leave()
    assert not first.have_left()
    assert second.look() is not None
    assert first.look() is not None
    second.leave()
    assert not first.have_left()
    first.leave()
    assert first.have_left()
    assert second.have_left()
