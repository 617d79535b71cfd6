"""The verdict of several ranks over a real TCPStore: who was first, whoever else saw it, and whoever dies."""

import re
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from nanwatch import Finding
from nanwatch.ranks import consensus
from nanwatch.ranks.consensus import OriginConsensus
from nanwatch.report.finding import Origin
from support.processes import until
from support.sightings import connect, finding, serve

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that look ten times a second, and wait a moment for a store that has gone and for ranks that leave."""
    for name, seconds in {"_INTERVAL": 0.1, "_STOPPING": 0.2, "_FAREWELL": 0.05}.items():
        monkeypatch.setattr(consensus, name, seconds)


@pytest.fixture
def server() -> Any:
    """A store of its own."""
    return serve()


class Seen(NamedTuple):
    """The finding of one rank: its place in the batch, the rank's clock, and the part of the model that it holds."""

    finding: Finding | None
    sequence: int = 0
    clock: tuple[int, ...] | None = None
    part: str = ""


FIRST = Seen(finding("produced", 7), 30)
_WEIGHT, _STAGE = finding("weight", 8, label="weight"), finding("data", 7, module="stage", label="input[0]")
# What four ranks see, of which rank 2 tells last; the true origin, and how many saw it at that place.
SCENARIOS: dict[str, tuple[list[Seen], int, int]] = {
    # One replica; its gradient makes the weights of all others nan in the next batch.
    "replica": ([Seen(_WEIGHT)] * 2 + [FIRST, Seen(_WEIGHT)], 2, 1),
    # A row-parallel layer sums what a column-parallel one has spoilt on one rank.
    "tensor parallel": ([Seen(finding("produced", 7, module="row"), 31)] * 2 + [FIRST] + [Seen(None)], 2, 1),
    # The stages behind get it with their data, at the beginning of the same batch.
    "pipeline": ([Seen(None)] * 2 + [FIRST._replace(part="stage 2"), Seen(_STAGE, part="stage 3")], 2, 1),
    # All gather one poisoned shard: nobody can say whose it was.
    "shard": ([Seen(_WEIGHT, 5)] * 4, 0, 4),
    # The source is ahead by validation batches.
    "clock": ([Seen(_WEIGHT, clock=(9, 0))] * 2 + [FIRST._replace(clock=(8, 2))] + [Seen(None)], 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_origin_is_right_whoever_told_first(server: Any, name: str) -> None:
    """Every rank names the same one, the true one: ranks are threads, each with its own connection."""
    ranks, source, alike = SCENARIOS[name]
    origins: dict[int, Origin] = {}

    def live(rank: int, seen: Seen) -> None:
        verdict = OriginConsensus(connect(server), rank, len(ranks), 20.0)
        try:
            time.sleep(0.3 * (rank == 2))
            if seen.finding is not None:
                assert verdict.publish(*seen)
            until(verdict.pending)
            origins[rank] = verdict.settle()
        finally:
            verdict.stop()

    threads = [threading.Thread(target=live, args=item) for item in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(origins) == len(ranks)
    for origin in origins.values():
        assert (origin.rank, origin.num_alike, origin.is_complete) == (source, alike, True)
        assert origin.num_failed == sum(seen.finding is not None for seen in ranks)


def test_nobody_waits_longer_than_peer_timeout_for_a_rank_that_never_answers(server):
    """Rank 1 has gone without a word: rank 0 settles with what it knows, and says that one did not answer."""
    verdict = OriginConsensus(connect(server), 0, 2, peer_timeout=0.5)
    verdict.publish(finding(), 3)
    origin = verdict.settle()
    verdict.stop()
    assert (origin.rank, origin.is_complete) == (0, False)
    assert str(origin).endswith("1 of 2 ranks did not answer in time")


def test_a_rank_that_is_stuck_writes_down_what_it_knows_and_holds_up_nobody(server):
    """While the rank waits in a collective, its thread reports what has happened and tells the others not to wait."""
    told: list[Origin] = []
    stuck = OriginConsensus(connect(server), 1, 2, peer_timeout=1.5)
    stuck.on_stuck = told.append
    failing = OriginConsensus(connect(server), 0, 2, peer_timeout=60.0)
    failing.publish(finding(), 3)
    assert failing.settle().is_complete
    until(lambda: told)
    stuck.stop()
    failing.stop()
    assert [origin.rank for origin in told] == [0]


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_store_that_has_gone_leaves_a_rank_with_its_own_finding(is_connected):
    """The rank that held the store died: publish says so in time, settle names what is known, nothing is raised."""
    server = serve()
    verdict = OriginConsensus(connect(server), 1, 4, peer_timeout=1.0)
    if is_connected:
        until(lambda: verdict._num_looks)
    del server
    assert verdict.publish(finding(rank=1), 3) is False
    origin = verdict.settle()
    assert (origin.rank, origin.num_reported) == (1, 1)
    assert re.match("the store (cannot be asked|does not answer)", verdict.trouble)
    verdict.stop()
