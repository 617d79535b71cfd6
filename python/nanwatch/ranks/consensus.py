"""Consensus of all ranks of a job on where the first non-finite value was, reached through the job's store.

Ranks never use a collective to agree: when one rank has failed, the others may wait in one of their own. A
thread looks at the store once a second. Only that thread uses the store, so that a store that hangs holds nobody up.
"""

from __future__ import annotations

import atexit
import random
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from ..report.finding import Finding, Origin, RankObservation, earliest
from ..report.report import NonFiniteError
from ..util.job import store_key
from ..util.visible import spell, warn_user

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_INTERVAL = 1.0  # seconds between two looks while all is well
_SETTLING = (0.05, 0.5)  # the first and the longest pause while ranks report
_STOPPING = 2.0  # seconds that stop() waits for the thread, which may hang in the store
# Seconds that a rank with the consensus waits at most until the others have it too. When one process of a job has
# ended, its launcher ends the others, and the store goes with the process that holds it.
_FAREWELL = 3.0

_FIRST = "first"
_NUM_FAILED, _NUM_REPORTED, _NUM_LEFT = "num_failed", "num_reported", "num_left"


class PeerNonFiniteError(NonFiniteError):
    """A nan or an inf on another rank. `.origin` says where it was first, `.report` has this rank's last frames."""

    def _message(self) -> str:
        head = self.origin or "a non-finite value on another rank"
        return f"{head}\n\nThis rank ({self.report.rank}), at that time:\n{self.report.to_text()}"


class OriginConsensus:
    """One rank's part in the consensus, from its construction to `stop()`.

    `store` is any torch.distributed Store that all ranks share, by default that of the default process group. `name`
    distinguishes consensuses of one job. `publish` and `settle` together wait at most `peer_timeout` seconds.
    `on_stuck` is called in the thread, with the Origin as far as it is known, when another rank has failed and this one
    waits in a collective: after a third of `peer_timeout` without a call, by two thirds at the latest. An exception of
    it is a warning.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        peer_timeout: float = 30.0,
        *,
        name: str = "",
        on_stuck: Callable[[Origin], object] | None = None,
    ) -> None:
        self.rank, self.world_size, self.peer_timeout = rank, world_size, peer_timeout
        self._on_stuck = on_stuck
        self._store: Store | None = default_store() if store is None else store
        self._prefix = f"nanwatch/consensus/{store_key()}/{name}"
        # Written by the thread alone, read by all.
        self._news: float | None = None
        self._known: Origin | None = None
        self._trouble = ""
        self._is_published = self._is_reported = self._is_stuck = self._has_left = self._is_settled = False
        self._num_looks, self._left_at = 0, inf
        # Written by the callers.
        self._mine: RankObservation | None = None
        self._settles = self._is_late = self._is_stopping = False
        self._budget = peer_timeout
        self._wake, self._looked = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="nanwatch consensus", daemon=True)
        self._thread.start()
        # A daemon thread that comes back from native code into an interpreter that is ending takes the process down.
        atexit.register(self.stop)

    def own_store(self) -> Store:
        """Return a connection of the caller's own to the keys of this consensus."""
        return own_store(self._prefix)

    def stop(self) -> None:
        """End the thread. Does nothing the second time."""
        self._is_stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOPPING)
        atexit.unregister(self.stop)

    @property
    def trouble(self) -> str:
        """The reason why the store cannot be asked any more, "" as long as it can."""
        return self._trouble or ("the store does not answer" if self._is_late else "")

    def pending(self) -> bool:
        """Return whether a rank had failed a second ago. Reads one attribute."""
        return self._news is not None

    def publish(
        self, finding: Finding, sequence: int, clock: Sequence[int] | None = None, part: str = ""
    ) -> bool:
        """Publish this rank's finding to the others, only the first time. Return whether the store has it.

        `sequence` is the place of the non-finite frame in its batch. `clock` counts alike on all ranks, such as steps
        and batches since the last of them. `part` names the part of the model that this rank holds. Errors of the store
        are not raised.
        """
        if self._mine is None:
            self._mine = RankObservation.of(finding, self.rank, sequence, clock, part)
            self._await(lambda: self._is_published)
        return self._is_published and not self.trouble

    def settle(self, patience: float = inf) -> Origin:
        """Return the origin, once all ranks have reported and know it, or `peer_timeout` or the `patience` is over.

        It is this rank's own finding where the store cannot be asked. Raises RuntimeError when nothing has failed, here
        or elsewhere.
        """
        before, self._settles, self._budget = self._num_looks, True, min(self._budget, patience)
        # A look under way may have begun before a rank failed, so it is no answer.
        self._await(lambda: self._is_settled or (self._news is None and self._num_looks > before + 1))
        if self._known is not None:
            return self._known
        if self._mine is not None:
            return Origin(self._mine, num_alike=1, num_failed=1, num_reported=1, world_size=self.world_size)
        why = f" ({self.trouble})" if self.trouble else "; ask pending() first"
        raise RuntimeError(f"there is nothing to settle: no rank has failed as far as this one knows{why}")

    def _await(self, is_over: Callable[[], bool]) -> None:
        """Wait until the thread has come to that, at most the rest of `peer_timeout`."""
        start, before = time.monotonic(), self._num_looks
        until = start + self._budget
        self._wake.set()
        with self._looked:
            while not is_over() and not self._trouble and time.monotonic() < until:
                self._looked.wait(min(0.1, self._budget))
        self._budget -= min(self._budget, time.monotonic() - start)
        self._is_late = self._num_looks == before and not is_over()

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            store, self._store = self._store, None
            assert store is not None
            protocol = StoreProtocol(own_store(self._prefix, store), self.world_size)
            # A reference would keep the job's server alive, and its port taken, beyond destroy_process_group.
            del store
            self._watch(protocol)
        except Exception as error:
            # The process that held the store has ended, or the network has failed: the job will notice by itself.
            self._trouble = f"the store cannot be asked: {spell(error)}"
        with self._looked:
            self._looked.notify_all()

    def _watch(self, protocol: StoreProtocol) -> None:
        chance = random.Random(self.rank)  # not the one that a training run draws from
        settling = _SETTLING[0]
        while not self._is_stopping:
            # Not all ranks of a job at the same moment.
            pause = _INTERVAL * chance.uniform(0.75, 1.25)
            if (self._settles and not self._is_settled) or (self._is_stuck and not self._has_left):
                pause, settling = settling, min(2 * settling, _SETTLING[1])
            elif self._news is not None and not self._is_reported:
                pause = min(pause, max(_SETTLING[0], self._news + self.peer_timeout / 3 - time.monotonic()))
            self._wake.wait(pause)
            self._wake.clear()
            if not self._is_stopping:
                self._look(protocol)
            with self._looked:
                self._num_looks += 1
                self._looked.notify_all()
        # Report without an observation, so that no rank waits for this one, if it knows of a failure. Do not look once
        # more: where the store has gone, torch writes a stack to stderr.
        if self._news is not None and not self._is_reported:
            protocol.report()
        if self._news is not None:
            self._leave(protocol)

    def _look(self, protocol: StoreProtocol) -> None:
        if self._mine is not None and not self._is_published:
            protocol.publish(self._mine)
            self._is_published = True
        if self._news is None:
            if not protocol.has_news():
                return
            self._news = time.monotonic()
        waited = time.monotonic() - self._news
        if not self._is_reported:
            if not (self._is_published or self._settles or waited > self.peer_timeout / 3):
                return
            self._is_stuck = not (self._is_published or self._settles)
            self._is_reported = True
            protocol.report()
        is_settling = self._settles and not self._is_settled
        if not is_settling and self._known is not None and (self._has_left or not self._is_stuck):
            return
        self._known = protocol.origin()
        is_complete = self._known is not None and self._known.is_complete
        if self._is_stuck and not self._has_left and (is_complete or waited > self.peer_timeout * 2 / 3):
            try:
                if self._on_stuck is not None and self._known is not None:
                    self._on_stuck(self._known)
            except Exception as error:
                warn_user(f"nanwatch: on_stuck raised {spell(error)}", may_raise=False)
            self._leave(protocol)
        if is_settling and is_complete:
            self._leave(protocol)
            self._is_settled = protocol.all_left() or time.monotonic() > self._left_at + _FAREWELL

    def _leave(self, protocol: StoreProtocol) -> None:
        if not self._has_left:
            self._has_left, self._left_at = True, time.monotonic()
            protocol.leave()


def default_store() -> Store:
    """Return the store of the default process group."""
    from torch.distributed import group

    return group.WORLD.get_group_store()  # type: ignore[union-attr] # a job has one


def own_store(prefix: str, store: Store | None = None) -> Store:
    """Return a connection of the caller's own to the keys with this prefix, by default of the default group's store."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = default_store() if store is None else store
    # A connection of its own where there is such a thing: on a shared one a rank that waits for a key holds up all.
    clone = getattr(store, "clone", None)
    return PrefixStore(prefix, store if clone is None else clone())


class StoreProtocol:
    """The few keys of the job's store through which ranks agree. No method waits for a rank.

    No key exists while all is well, and a rank that looks reads a single key: the earliest observation, kept by
    compare-and-set. Nothing grows with the number of ranks but counts.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size

    def has_news(self) -> bool:
        """Return whether a rank has failed."""
        return bool(self._store.check([_FIRST]))

    def publish(self, observation: RankObservation) -> None:
        """Publish the observation of this rank: leave the earlier of it and that of others under one key."""
        self._store.add(_at(observation), 1)
        self._store.add(_NUM_FAILED, 1)
        present, mine = "", observation.to_json()
        while True:
            latest = self._store.compare_set(_FIRST, present, mine).decode()
            if latest == mine or earliest(RankObservation.from_json(latest), observation) != observation:
                return
            present = latest

    def report(self) -> None:
        """Count this rank as one that has reported, with or without an observation; once per rank."""
        self._store.add(_NUM_REPORTED, 1)

    def leave(self) -> None:
        """Count this rank as one that needs the store and the other ranks no longer; once per rank."""
        self._store.add(_NUM_LEFT, 1)

    def all_left(self) -> bool:
        """Return whether all ranks have left."""
        return bool(self._store.add(_NUM_LEFT, 0) >= self._world_size)

    def origin(self) -> Origin | None:
        """Return the origin as far as it is known now, None when no rank has failed."""
        num_reported = self._store.add(_NUM_REPORTED, 0)  # before the rest, which those ranks have sent
        if not self.has_news():
            return None
        first = RankObservation.from_json(self._store.get(_FIRST))
        return Origin(
            first=first,
            num_alike=self._store.add(_at(first), 0),
            num_failed=self._store.add(_NUM_FAILED, 0),
            num_reported=num_reported,
            world_size=self._world_size,
        )


def _at(observation: RankObservation) -> str:
    return f"at/{observation.place}"
