"""The verdict of several ranks over a real TCPStore: who was first, whoever else saw it, and whoever dies."""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch.distributed as dist

from nanwatch import Finding
from nanwatch.ranks.consensus import OriginConsensus
from nanwatch.report.finding import Origin
from support.sightings import connect, finding, serve

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.fixture
def server() -> Any:
    """A store of its own."""
    return serve()


@dataclass
class Seen:
    """The finding of one rank of a scenario, and the delay before it."""

    finding: Finding | None
    sequence: int = 0
    clock: tuple[int, ...] | None = None
    part: str = ""
    delay: float = 0.0
    dies: bool = False  # right after it has told


@dataclass
class Scenario:
    """Events in a job, and the truth about them."""

    ranks: list[Seen]
    origin: int
    alike: int = 1
    peer_timeout: float = 20.0
    named: str = field(default="layer")


def scenario(number: int) -> Scenario:
    """The scenarios by turns, each with random ranks, places and delays."""
    chance = random.Random(number)
    world = chance.randint(2, 12)
    source, batch, place = chance.randrange(world), chance.randint(0, 10_000), chance.randint(1, 200)

    def others(seen: Seen) -> list[Seen]:
        return [replace(seen, delay=chance.uniform(0, 0.3)) for _ in range(world)]

    def with_source(ranks: list[Seen], seen: Seen) -> list[Seen]:
        ranks[source] = replace(seen, delay=chance.uniform(0, 0.6))
        return ranks

    produced = Seen(finding("produced", batch), place)
    match number:
        case 0:  # one replica; its gradient makes the weights of all others nan in the next batch
            later = Seen(finding("weight", batch + 1, label="weight"), 0)
            return Scenario(with_source(others(later), produced), source)
        case (
            1
        ):  # tensor parallel: a row-parallel layer sums what a column-parallel one has spoilt on one rank
            later = Seen(finding("produced", batch, module="row"), place + 1)
            return Scenario(with_source(others(later), produced), source)
        case 2:  # a pipeline: the stages behind get it with their data, at the beginning of the same batch
            ranks = [Seen(None, part=f"stage {rank}", delay=chance.uniform(0, 0.3)) for rank in range(world)]
            for rank in range(source + 1, world):
                ranks[rank].finding = finding("data", batch, module="stage", label="input[0]")
            ranks[source] = replace(produced, part=f"stage {source}", delay=chance.uniform(0, 0.6))
            return Scenario(ranks, source)
        case 3:  # all gather one poisoned shard: nobody can say whose it was
            ranks = others(Seen(finding("weight", batch, label="weight"), place))
            return Scenario(ranks, 0, alike=world)
        case _:  # the source is ahead by validation batches, and dies as soon as it has told
            later = Seen(finding("weight", batch - 3, label="weight"), 0, clock=(batch + 1, 0))
            first = replace(produced, clock=(batch, 2), dies=True)
            return Scenario(with_source(others(later), first), source)


def play(server: Any, played: Scenario) -> list[Origin | None]:
    """All ranks as threads, each with its own connection; the origin that each of them names."""
    world = len(played.ranks)
    named: list[Origin | None] = [None] * world

    def live(rank: int) -> None:
        seen = played.ranks[rank]
        verdict = OriginConsensus(connect(server), rank, world, played.peer_timeout)
        try:
            time.sleep(seen.delay)
            if seen.finding is not None:
                assert verdict.publish(seen.finding, seen.sequence, seen.clock, seen.part)
                if seen.dies:
                    return
            else:
                until = time.monotonic() + 30
                while not verdict.pending() and time.monotonic() < until:
                    time.sleep(0.01)
            named[rank] = verdict.settle()
        finally:
            verdict.stop()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return named


@pytest.mark.parametrize("number", [*range(4), pytest.param(4, marks=pytest.mark.slow)])
def test_the_origin_is_right_whoever_told_first(server, number):
    """Every rank that lives names the same one, the true one, in each kind of job and order of events."""
    played = scenario(number)
    named = play(server, played)
    for rank, origin in enumerate(named):
        if played.ranks[rank].dies:
            continue
        assert origin is not None, f"rank {rank} has no verdict"
        assert (origin.rank, origin.num_alike) == (played.origin, played.alike)
        assert origin.is_complete
        assert origin.num_failed == sum(seen.finding is not None for seen in played.ranks)


def test_nobody_waits_longer_than_peer_timeout_for_a_rank_that_never_answers(server):
    """Rank 1 has gone without a word: rank 0 settles with what it knows, and says that one did not answer."""
    verdict = OriginConsensus(connect(server), 0, 2, peer_timeout=1.5)
    start = time.monotonic()
    verdict.publish(finding(), 3)
    origin = verdict.settle()
    waited = time.monotonic() - start
    verdict.stop()
    assert waited < 60  # on a busy machine; without an end it would be for good
    assert origin.rank == 0
    assert not origin.is_complete
    assert str(origin).endswith("1 of 2 ranks did not answer in time")


def test_a_rank_that_is_stuck_writes_down_what_it_knows_and_holds_up_nobody(server):
    """While the rank waits in a collective, its thread reports what has happened and tells the others not to wait."""
    told: list[Origin] = []
    stuck = OriginConsensus(connect(server), 1, 2, peer_timeout=6.0, on_stuck=told.append)
    failing = OriginConsensus(connect(server), 0, 2, peer_timeout=60.0)
    failing.publish(finding(), 3)
    origin = failing.settle()
    assert origin.is_complete
    for _ in range(300):
        if told:
            break
        time.sleep(0.05)
    stuck.stop()
    failing.stop()
    assert [one.rank for one in told] == [0]


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_store_that_has_gone_leaves_a_rank_with_its_own_finding(is_connected):
    """The rank that held the store died: publish says so in time, settle names what is known, nothing is raised."""
    server = serve()
    verdict = OriginConsensus(connect(server), 1, 4, peer_timeout=3.0)
    if is_connected:
        time.sleep(1.5)
    del server
    start = time.monotonic()
    assert verdict.publish(finding(rank=1), 3) is False
    origin = verdict.settle()
    assert time.monotonic() - start < 60  # on a busy machine; without an end it would be for good
    assert (origin.rank, origin.num_reported) == (1, 1)
    assert re.match("the store (cannot be asked|does not answer)", verdict.trouble)
    verdict.stop()
