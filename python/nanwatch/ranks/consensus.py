"""Consensus of all ranks of a job on where the first non-finite value was, reached through the job's store.

Ranks never use a collective for it: when one rank has failed, the others may be waiting for it in one of their own. A
thread looks at the store once a second. Only that thread uses the store, so that a store that hangs holds nobody up.
"""

from __future__ import annotations

import atexit
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from ..report.finding import Finding, Origin, RankObservation, earliest
from ..report.report import NonFiniteError
from ..util.job import store_key
from ..util.visible import spell, warn_user

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_INTERVAL = 1.0  # seconds between two looks while all is well
_INTERVAL_SETTLING = (0.05, 0.5)  # the first and the longest pause while ranks report
_MOST_QUESTIONS = 20_000.0  # a second, from all ranks; a store answers 55,000 from one connection
_STOPPING = 2.0  # seconds that stop() waits for the thread, which may hang in the store
# Seconds that a rank with the consensus waits at most until the others have it too. When one process of a job has
# ended, its launcher ends the others, and the store goes with the process that holds it.
_FAREWELL = 3.0

_FAILED, _INSIDE, _DATA = "failed", "inside", "data"
_NUM_FAILED, _NUM_REPORTED, _COMPLETE, _NUM_LEFT = "num_failed", "num_reported", "complete", "num_left"


class PeerNonFiniteError(NonFiniteError):
    """A nan or an inf on another rank. `.origin` says where it was first, `.report` has this rank's last frames."""

    def _told(self) -> str:
        head = self.origin or "a non-finite value on another rank"
        return f"{head}\n\nThis rank ({self.report.rank}), at that time:\n{self.report.to_text()}"


class OriginConsensus:
    """One rank's part in the consensus, from its construction to `stop()`.

    Args:
        store: any torch.distributed Store that all ranks share, by default that of the default process group. The keys
            get a prefix with torchrun's run id and attempt.
        rank, world_size: of this process and of the job.
        peer_timeout: seconds that `publish` and `settle` together wait at most for the store and for other ranks.
        part: the part of the model that this rank holds, the same for replicas; name it where ranks hold different
            parts, as the stages of a pipeline do.
        name: distinguishes several consensuses of one job; the same on all ranks.
        on_stuck: called, in the thread of the consensus, with the Origin as far as it is known when another rank has
            failed and this one has neither published nor settled for a third of `peer_timeout`, because it waits in a
            collective. The call comes by two thirds of `peer_timeout` at the latest. An exception of it is a warning.

    Raises ValueError for numbers that mean nothing.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        peer_timeout: float = 30.0,
        *,
        part: str = "",
        name: str = "",
        on_stuck: Callable[[Origin], object] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank should be from 0 to world_size - 1, got rank {rank} of {world_size}")
        if not (isfinite(peer_timeout) and peer_timeout > 0):
            raise ValueError(f"peer_timeout should be a number of seconds above 0, got {peer_timeout!r}")
        self.rank, self.world_size, self.peer_timeout, self.part = rank, world_size, peer_timeout, part
        self._on_stuck = on_stuck
        self._store: Store | None = default_store() if store is None else store
        self.name = name
        self._prefix = f"nanwatch/consensus/{store_key(os.environ)}/{name}"
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Written by the thread alone, read by all.
        self._news: float | None = None
        self._known: Origin | None = None
        self._trouble = ""
        self._reported = False
        self._is_stuck = False
        self._has_left = False
        # Written by the callers.
        self._mine: RankObservation | None = None
        self._budget = peer_timeout
        self._is_late = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanwatch consensus", daemon=True)
        self._thread.start()
        # A daemon thread that comes back from native code into an interpreter that is ending takes the process down.
        atexit.register(self.stop)

    def own_store(self) -> Store:
        """Return a connection of the caller's own to the keys of this consensus."""
        return own_store(default_store(), self._prefix)

    def stop(self) -> None:
        """End the thread. Does nothing the second time."""
        self._stopping.set()
        self._jobs.put(lambda: None)
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
        self, finding: Finding, sequence: int, clock: Sequence[int] | None = None, part: str | None = None
    ) -> bool:
        """Publish this rank's finding to the others, only the first time. Return whether the store has it.

        `sequence` is the place of the non-finite frame in its batch, from 0. `clock` is for ranks that do not all make
        the same number of forwards: whole numbers that count alike everywhere, such as optimizer steps and batches
        since the last of them. All ranks give one of the same length, or none does. `part` replaces the consensus's.
        Errors of the store are not raised.
        """
        if self._mine is None:
            part = self.part if part is None else part
            self._mine = mine = RankObservation.of(finding, self.rank, sequence, clock, part)
            return self._in_thread(lambda until: self._publish(mine))
        return not self.trouble

    def settle(self, own: Finding | None = None) -> Origin:
        """Return the origin, once all ranks have reported and know it, or `peer_timeout` is over.

        `own` is the finding that this rank has published, if any. It is the origin where the store cannot be asked.
        Raises RuntimeError when nothing has failed, here or elsewhere.
        """
        if not self._in_thread(self._settle) and own is not None and self._known is None:
            mine = self._mine or RankObservation.of(own, self.rank, 0, None, self.part)
            return Origin(mine, num_alike=1, num_failed=1, num_reported=1, world_size=self.world_size)
        if self._known is None:
            raise RuntimeError(
                "there is nothing to settle: no rank has failed as far as this one knows"
                + (f" ({self.trouble})" if self.trouble else "; ask pending() first")
            )
        return self._known

    def _in_thread(self, job: Callable[[float], None]) -> bool:
        """Run a job in the thread. Return False when it failed or took longer than the rest of `peer_timeout`."""
        done, succeeded = threading.Event(), False
        start = time.monotonic()
        until = start + self._budget

        def run() -> None:
            nonlocal succeeded
            try:
                if not self._trouble:
                    job(until)
                    succeeded = True
            finally:
                done.set()

        self._jobs.put(run)
        while time.monotonic() < until and self._thread.is_alive() and not done.wait(min(0.1, self._budget)):
            pass
        self._budget -= min(self._budget, time.monotonic() - start)
        self._is_late = not done.is_set()
        return succeeded

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            store, self._store = self._store, None
            assert store is not None
            self._protocol = StoreProtocol(own_store(store, self._prefix), self.world_size)
            # A reference would keep the job's server alive, and its port taken, beyond destroy_process_group.
            del store
        except Exception as error:
            self._fail(error)
        chance = random.Random(self.rank)  # not the one that a training run draws from
        while not self._stopping.is_set():
            # Not all ranks of a job at the same moment.
            pause = max(_INTERVAL, self.world_size / _MOST_QUESTIONS) * chance.uniform(0.75, 1.25)
            if self._news is not None and not self._reported:
                due = self._news + self.peer_timeout / 3 - time.monotonic()
                pause = min(pause, max(_INTERVAL_SETTLING[0], due))
            try:
                try:
                    job = self._jobs.get(timeout=pause)
                except queue.Empty:
                    job = self._look
                if not self._stopping.is_set():
                    job()
            except Exception as error:
                self._fail(error)
        try:
            self._say_nothing()
        except Exception as error:
            self._fail(error)

    def _say_nothing(self) -> None:
        """Report without an observation, so that no rank waits for this one, if it knows of a failure.

        Does not look once more: where the store has gone, torch writes a stack to stderr.
        """
        if not self._trouble and not self._reported and self._news is not None:
            self._report()
            self._leave()

    def _fail(self, error: Exception) -> None:
        # The process that held the store has ended, or the network has failed: the job will notice by itself.
        self._trouble = f"the store cannot be asked: {spell(error)}"

    def _look(self) -> None:
        if self._trouble or self._has_left:
            return
        if self._news is None:
            if self._protocol.has_news():
                self._learn()
            return
        waited = time.monotonic() - self._news
        if not self._reported and waited > self.peer_timeout / 3:
            self._is_stuck = True
            self._report()
        if self._is_stuck and (self._protocol.is_complete() or waited > self.peer_timeout * 2 / 3):
            self._learn()
            try:
                if self._on_stuck is not None and self._known is not None:
                    self._on_stuck(self._known)
            except Exception as error:
                warn_user(f"nanwatch: on_stuck raised {spell(error)}", may_raise=False)
            self._leave()

    def _learn(self) -> None:
        self._known = self._protocol.origin() or self._known
        if self._known is not None and self._news is None:
            self._news = time.monotonic()

    def _publish(self, mine: RankObservation) -> None:
        self._protocol.publish(mine)
        self._report()
        self._learn()

    def _report(self) -> None:
        if not self._reported:
            self._reported = True
            self._protocol.report()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._protocol.leave()

    def _settle(self, until: float) -> None:
        if not self._protocol.has_news():
            return
        self._report()
        self._wait(self._protocol.is_complete, until)
        self._learn()
        self._leave()
        if self._protocol.is_complete():
            self._wait(self._protocol.all_left, min(until, time.monotonic() + _FAREWELL))

    def _wait(self, is_over: Callable[[], bool], until: float) -> None:
        """Ask again and again, until a little before the caller gives up waiting."""
        pause, longest = _INTERVAL_SETTLING
        longest = max(longest, self.world_size / _MOST_QUESTIONS)
        while not is_over() and time.monotonic() + 2 * pause < until:
            if self._stopping.wait(pause):
                break
            pause = min(2 * pause, longest, max(0.01, (until - time.monotonic()) / 4))


def default_store() -> Store:
    """Return the store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def own_store(store: Store, prefix: str) -> Store:
    """Return a connection of the caller's own to the keys with this prefix."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    # A connection of its own where there is such a thing: on a shared one a rank that waits for a key holds up all.
    clone = getattr(store, "clone", None)
    return PrefixStore(prefix, store if clone is None else clone())


class StoreProtocol:
    """The few keys of the job's store through which ranks agree. No method waits for a rank.

    No key exists while all is well, and a rank that looks asks for one. A rank that fails sends eleven short messages,
    and eleven more to settle; one that only settles sends twelve. Nothing grows with the
    number of ranks: the store keeps the earliest observation by compare-and-set, and a count of the ranks whose
    observation is at one place.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size

    def has_news(self) -> bool:
        """Return whether a rank has failed."""
        found: bool = self._store.check([_FAILED])
        return found

    def publish(self, observation: RankObservation) -> None:
        """Publish the observation of this rank."""
        self._store.add(_at(observation), 1)
        self._store.add(_NUM_FAILED, 1)
        self._lower(_DATA if observation.came_with_the_data else _INSIDE, observation)
        self._store.set(_FAILED, "")  # after the observation: who reads this finds one

    def _lower(self, key: str, observation: RankObservation) -> None:
        """Leave the earlier of `observation` and the value under the key, whoever else does the same."""
        mine, expected = observation.to_json(), ""
        while True:
            held: bytes = self._store.compare_set(key, expected, mine)
            if held == mine.encode() or RankObservation.from_json(held).order <= observation.order:
                return
            expected = held.decode()

    def report(self) -> None:
        """Count this rank as one that has reported, with or without an observation; once per rank."""
        if self._store.add(_NUM_REPORTED, 1) == self._world_size:
            self._store.set(_COMPLETE, "")

    def is_complete(self) -> bool:
        """Return whether all ranks have reported."""
        found: bool = self._store.check([_COMPLETE])
        return found

    def leave(self) -> None:
        """Count this rank as one that needs the store and the other ranks no longer; once per rank."""
        self._store.add(_NUM_LEFT, 1)

    def all_left(self) -> bool:
        """Return whether all ranks have left."""
        return self._store.add(_NUM_LEFT, 0) >= self._world_size

    def origin(self) -> Origin | None:
        """Return the origin as far as it is known now, None when no rank has failed."""
        first = earliest(self._read(_INSIDE), self._read(_DATA))
        if first is None:
            return None
        return Origin(
            first=first,
            num_alike=self._store.add(_at(first), 0),
            num_failed=self._store.add(_NUM_FAILED, 0),
            num_reported=self._store.add(_NUM_REPORTED, 0),
            world_size=self._world_size,
        )

    def _read(self, key: str) -> RankObservation | None:
        return RankObservation.from_json(self._store.get(key)) if self._store.check([key]) else None


def _at(observation: RankObservation) -> str:
    return f"at/{observation.place}"
