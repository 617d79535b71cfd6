"""The verdict's requests to the store: how many, how large, and which value remains of many simultaneous writers."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch.distributed as dist

from nanwatch.distributed.consensus import StoreProtocol
from nanwatch.report.finding import Origin, RankObservation
from support.sightings import connect, finding, serve

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.fixture
def server() -> Any:
    """A store of its own."""
    return serve()


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return getattr(self.store, name)(*arguments)

        return call


def test_while_all_is_well_a_look_is_one_question_and_no_key(server):
    """This holds for any number of ranks."""
    counting = Counting(connect(server))
    board = StoreProtocol(counting, 16_384)
    keys = server.num_keys()
    for _ in range(5):
        assert not board.has_news()
    assert counting.calls == ["check"] * 5
    assert server.num_keys() == keys


def test_a_rank_that_fails_after_many_sends_no_more_than_the_first(server):
    """The number of messages of one rank does not grow with the number of ranks."""
    sent = []
    for rank in range(40):
        counting = Counting(connect(server) if rank % 10 == 0 else server)
        board = StoreProtocol(counting, 40)
        board.publish(RankObservation.of(finding(batch=3), rank, 5, None, ""))
        board.report()
        origin = board.origin()
        assert origin is not None
        assert (origin.rank, origin.num_alike, origin.num_failed) == (0, rank + 1, rank + 1)
        sent.append(len(counting.calls))
    assert max(sent) <= sent[0] + 1  # the last rank also sets the key that says so
    assert server.num_keys() < 12


@pytest.mark.slow
def test_a_thousand_writers_leave_the_earliest(server):
    """All at once from 20 connections: the least is there, none was lost, and the counts are exact."""
    chance = random.Random(1)
    sightings = [
        RankObservation.of(
            finding(chance.choice(["produced", "weight"]), chance.randint(5, 9)),
            rank,
            chance.randint(0, 9),
            None,
            "",
        )
        for rank in range(1000)
    ]

    def write(mine: list[RankObservation]) -> None:
        board = StoreProtocol(connect(server), 1000)
        for sighting in mine:
            board.publish(sighting)
            board.report()

    chance.shuffle(sightings)
    threads = [threading.Thread(target=write, args=(sightings[start::20],)) for start in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    origin = StoreProtocol(connect(server), 1000).origin()
    first = min(sightings, key=lambda one: (one.clock, one.sequence, one.rank))
    alike = [
        one
        for one in sightings
        if (one.clock, one.sequence, one.kind) == (first.clock, first.sequence, first.kind)
    ]
    assert origin == Origin(first, len(alike), 1000, 1000, 1000)
