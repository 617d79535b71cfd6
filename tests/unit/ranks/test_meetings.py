"""Ranks that can do something only together decide alike, and none waits for ever."""

import threading
import time

import pytest
import torch.distributed as dist

from nanwatch.ranks import meetings as joint


class _EachRanks(dict[str, int]):
    """The count of calls of each thread, as if it were a rank of its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __getitem__(self, name: str) -> int:
        return int(vars(self._local).get(name, 0))

    def __setitem__(self, name: str, count: int) -> None:
        vars(self._local)[name] = count


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(joint, "_calls", _EachRanks())
    return dist.HashStore()


def verdicts(store: dist.Store, num_ranks: int, delays: list[float], timeout: float) -> list[bool]:
    found: list[bool] = []

    def join(delay: float) -> None:
        time.sleep(delay)
        found.extend(joint.all_join("a", num_ranks, timeout, store) for _ in range(2))

    threads = [threading.Thread(target=join, args=(delay,)) for delay in delays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found


def test_all_ranks_join(store):
    assert verdicts(store, 3, [0, 0, 0.1], 30) == [True] * 6


def test_a_rank_that_never_comes_is_waited_for_only_so_long(store):
    assert verdicts(store, 3, [0, 0], 0.1) == [False] * 4
