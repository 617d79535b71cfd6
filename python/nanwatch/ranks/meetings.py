"""What several ranks do only together, through the job's store, without a collective that could hang."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

from ..util.job import store_key
from ..util.visible import spell, warn_user
from .consensus import OriginConsensus, default_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_POLL = 0.02  # seconds
_calls: Counter[str] = Counter()


def all_join(name: str, num_ranks: int, timeout: float, store: Store | None = None) -> bool:
    """Return whether so many ranks call this, with this name, within `timeout` seconds; the same on each of them.

    Each of them calls it equally often. `store` is the job's by default.
    """
    store = default_store() if store is None else store
    _calls[name] += 1
    place = f"nanwatch/joint/{store_key(os.environ)}/{name}/{_calls[name]}"
    verdict = f"{place}/verdict"
    deadline = time.monotonic() + timeout
    if store.add(f"{place}/arrived", 1) == num_ranks:
        store.compare_set(verdict, "", "all")
    while not store.check([verdict]):
        if time.monotonic() > deadline:
            store.compare_set(verdict, "", "some")
            break
        time.sleep(_POLL)
    return bool(store.get(verdict) == b"all")


# A meeting sends three short messages a rank, and the store answers 55,000 a second.
_MOST_RANKS = 1024


class StepMeeting:
    """Meeting of all ranks before each step of an optimizer, so that none steps where another has failed.

    The first meeting finds out whether every rank holds meetings: a rank may have no watch. Without one of them, and
    once a rank has not come within `timeout` seconds, there are none.
    """

    def __init__(self, consensus: OriginConsensus, timeout: float) -> None:
        self._num_ranks, self._timeout = consensus.world_size, timeout
        self._store, self._name = consensus.own_store(), consensus.name
        self._number = 0
        self._is_open = self._num_ranks <= _MOST_RANKS

    def arrive(self) -> None:
        """Come to the next meeting, and wait for nobody."""
        try:
            if self._number == 0 and self._is_open:
                self._is_open = all_join(f"steps/{self._name}", self._num_ranks, self._timeout)
            if not self._is_open:
                return
            self._number += 1
            if self._store.add(f"step/{self._number}", 1) == self._num_ranks:
                self._store.set(f"step/{self._number}/all", "")
                self._store.delete_key(f"step/{self._number - 1}")
                self._store.delete_key(f"step/{self._number - 2}/all")  # each rank has read it
        except RuntimeError as error:
            self._end(error)

    def wait(self) -> bool:
        """Wait until all ranks have come, and return whether one of them has failed."""
        try:
            if self._is_open:
                self._store.wait([f"step/{self._number}/all"], timedelta(seconds=self._timeout))
            return bool(self._store.check(["failed"]))
        except RuntimeError as error:
            self._end(error)
            return False

    def _end(self, error: RuntimeError) -> None:
        if self._is_open:
            self._is_open = False
            warn_user(
                f"nanwatch: steps wait for the other ranks no more: {spell(error)}",
                may_raise=False,
            )
