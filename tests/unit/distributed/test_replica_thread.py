"""Ranks as threads of one process, each with a connection of its own to one store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nanwatch.distributed import replica_thread
from nanwatch.distributed.replica_bytes import Copy
from nanwatch.distributed.replica_thread import ReplicaThread
from nanwatch.distributed.replicas import Print
from nanwatch.report.replica import ReplicaDifference
from support.sightings import connect, serve


class Job:
    """Ranks without a run: the test puts their fingerprints."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, size: int, timeout: float, folder: Path | None = None
    ) -> None:
        self.server = serve()
        self.group = tuple(range(size))
        self._world = type("Group", (), {})()
        monkeypatch.setattr(replica_thread, "_world", lambda: self._world)
        monkeypatch.setattr(replica_thread, "_next_name", lambda: "1")
        monkeypatch.setattr(replica_thread, "default_store", lambda: connect(self.server))
        monkeypatch.setattr(replica_thread, "_MARGIN", 0.01)
        monkeypatch.setattr(replica_thread, "FAREWELL", 1.0)
        self.ranks = []
        for rank in range(size):
            monkeypatch.setattr(replica_thread, "rank_and_world_size", lambda rank=rank: (rank, size))
            self.ranks.append(ReplicaThread(1, timeout, folder))

    def check(self, number: int, values: dict[int, int]) -> None:
        """Put a check of these ranks, each with the value of its weight."""
        for rank, value in values.items():
            found = {self.group: {"weight": Print("weight", value)}}
            prints: Any = type("Prints", (), {"read": lambda self, *_, found=found: found})()
            self.ranks[rank].step = number
            self.ranks[rank].put(number, number, prints, 0.01)

    def differences(self, ranks: list[int], tensors: dict[int, torch.Tensor]) -> list[ReplicaDifference]:
        """Copy tensors when they are wanted, until each of these ranks has a difference to tell."""
        until = time.monotonic() + 20
        while not all(self.ranks[rank].found for rank in ranks) and time.monotonic() < until:
            for rank in tensors:
                if (wanted := self.ranks[rank].wanted) is not None:
                    self.ranks[rank].wanted = None
                    wanted.copies.put(Copy(9, tensors[rank], {3: 1, 4: rank}))
            time.sleep(0.01)
        return [self.ranks[rank].found[0] for rank in ranks]

    def end(self) -> None:
        for rank in self.ranks:
            rank.stop()
        for rank in self.ranks:
            rank.join(10)
            assert not rank.is_alive()


def test_the_odd_rank_is_told_by_all_with_both_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check, the batch in which it began, the element, and the bytes of both; once."""
    job = Job(monkeypatch, 4, 20.0, tmp_path)
    job.check(1, dict.fromkeys(range(4), 5))
    for number in range(2, 5):
        job.check(number, {0: 5, 1: 5, 2: 6, 3: 5})
    even = torch.ones(8)
    odd = even.clone()
    odd[3] = 1.5
    found = job.differences([0, 1, 2, 3], {0: even, 1: even, 2: odd, 3: even})
    for one in found:
        assert (one.step, one.equal_at, one.ranks, one.is_majority, one.tensors) == (
            2,
            1,
            (2,),
            True,
            ("weight",),
        )
        assert one.distance is not None
        assert (one.distance.num_differing, one.distance.largest, one.began) == (1, 0.5, 4)
    job.check(40, {0: 5, 1: 5, 2: 6, 3: 5})  # known by now
    job.end()
    assert [len(rank.found) for rank in job.ranks] == [1, 1, 1, 1]
    written = sorted(path.name for path in tmp_path.glob("*/*"))
    assert len(written) == 2
    assert "rank-2-weight.pt" in written


def test_a_rank_that_is_gone_holds_nobody_up_for_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others judge among themselves, and the difference says how many."""
    job = Job(monkeypatch, 4, 0.5)
    job.check(1, {0: 5, 1: 5, 2: 6})
    begun = time.monotonic()
    found = job.differences([0, 1, 2], {rank: torch.ones(2) for rank in range(3)})
    assert time.monotonic() - begun < 15
    assert {(one.ranks, one.num_ranks, one.size) for one in found} == {((2,), 3, 4)}
    job.end()


def test_equal_replicas_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order and the speed of the ranks."""
    job = Job(monkeypatch, 3, 5.0)
    for rank in (2, 0, 1):
        for number in range(1, 30):
            job.check(number, {rank: number})
    job.end()
    assert [len(rank.found) for rank in job.ranks] == [0, 0, 0]


def test_a_store_that_is_gone_ends_the_thread_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process that held it has ended: the job will notice by itself."""
    job = Job(monkeypatch, 2, 5.0)
    for rank in job.ranks:
        rank._until = 0.0

    def refuse(*_: Any) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(replica_thread.ReplicaProtocol, "post", refuse)
    job.check(1, {0: 1, 1: 1})
    job.end()
