"""Consensus of all ranks of a job on where the first non-finite value was, reached through the job's store.

No collective is called: when one rank has failed, the others may wait in one of their own. A thread looks at the store
once a second. While all is well no key exists, and it reads a single one: the earliest observation, kept by
compare-and-set. Nothing grows with the number of ranks but counts. Only the thread asks there, so that a store that
hangs holds nobody up.

All watches of a process share one consensus: if one fails, the job has failed. It begins with the first batch after
`init_process_group`. After this rank has raised, the next batch begins another one. The keys of the store contain its
number, which is equal on all ranks: a rank that comes late finds each consensus that the others have settled, and
settles it too.
"""

from __future__ import annotations

import atexit
import hashlib
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from typing import Any

import torch
from torch import nn

from ..instrumentation.global_hooks import after_steps
from ..report.finding import Finding, Origin, RankObservation, earliest
from ..report.report import NonFiniteError, Report
from ..util.job import rank_and_world_size, store_key
from ..util.messages import spell, warn_user
from ..util.program import each_module

_INTERVAL = 1.0  # seconds between two looks while all is well
_SETTLING = (0.05, 0.5)  # the first and the longest pause while ranks report
_STOPPING = 2.0  # seconds that stop() waits for the thread, which may hang in the store
# Seconds that a rank with the consensus waits at most until the others have it too. When one process of a job has
# ended, its launcher ends the others, and the store goes with the process that holds it.
_FAREWELL = 3.0

# The keys: the earliest observation, and the numbers of ranks that have failed, that have reported with or without an
# observation, and that need the store and the other ranks no longer.
FIRST = "first"
NUM_FAILED, NUM_REPORTED, NUM_LEFT = "num_failed", "num_reported", "num_left"

# Seconds until this rank knows of a failure elsewhere: it looks at the store about once a second.
_NEWS = 2.0
# gloo raises RuntimeError, as nearly everything in PyTorch does. So words of its message tell an error of a collective.
_WORDS = ("gloo", "by peer", "NCCL", "ProcessGroup", "c10d", "Timed out waiting", "Socket closed")
# A barrier before a step sends three short messages a rank, and the store answers 55,000 a second.
_MOST_RANKS, _MOST_FIRSTS = 1024, 64


class PeerNonFiniteError(NonFiniteError):
    """A nan or an inf on another rank. `.origin` says where it was first, `.report` has this rank's last frames."""

    def _message(self) -> str:
        head = self.origin or "a non-finite value on another rank"
        return f"{head}\n\nThis rank ({self.report.rank}), at that time:\n{self.report.to_text()}"


def process_group() -> Any:
    """Return the default process group, None without one."""
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


def default_store() -> Any:
    """Return the store of the default process group."""
    return process_group().get_group_store()


def own_store(name: str, store: Any) -> Any:
    """Return a new connection to the store, for the keys of this name. Other attempts of the job have other keys."""
    # On a shared connection a call that waits for a key blocks all others. Not every store can be cloned.
    clone = getattr(store, "clone", None)
    prefix = f"nanwatch/{store_key()}/{name}"
    return torch.distributed.PrefixStore(prefix, store if clone is None else clone())  # type: ignore[attr-defined]


def publish(store: Any, observation: RankObservation) -> None:
    """Publish the observation of a rank: leave the earlier of it and that of others under one key."""
    store.add(f"at/{observation.place}", 1)
    store.add(NUM_FAILED, 1)
    present, mine = "", observation.to_json()
    while True:
        latest = store.compare_set(FIRST, present, mine).decode()
        if latest == mine or earliest(RankObservation.from_json(latest), observation) != observation:
            return
        present = latest


class OriginConsensus:
    """One rank's part in the consensus, from its construction to `stop()`.

    `store` is any torch.distributed Store that all ranks share. `name` distinguishes consensuses of one job. `publish`
    and `settle` together wait at most `peer_timeout` seconds.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, peer_timeout: float = 30.0, name: str = ""
    ) -> None:
        self.rank, self.world_size, self.peer_timeout = rank, world_size, peer_timeout
        self.name = f"consensus/{name}"
        self._stores = [store]  # until the thread has a connection of its own
        # Written by the thread alone, read by all.
        self._news: float | None = None
        self._known: Origin | None = None
        self._trouble = ""
        self._is_published = self._is_settled = False
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

    def on_stuck(self, origin: Origin) -> None:
        """Act on the origin, as far as it is known, when this rank waits in a collective for a failed rank."""

    def _run(self) -> None:
        try:
            # A reference would keep the job's server alive, and its port taken, beyond destroy_process_group.
            store = own_store(self.name, self._stores.pop())
            self._watch(store)
        except Exception as error:
            # The process that held the store has ended, or the network has failed: the job will notice by itself.
            self._trouble = f"the store cannot be asked: {spell(error)}"
        with self._looked:
            self._looked.notify_all()

    def _watch(self, store: Any) -> None:
        chance = random.Random(self.rank)  # not the one that a training run draws from
        while not store.check([FIRST]):
            # The ranks of a job ask at different moments.
            interval = _SETTLING[0] if self._settles else _INTERVAL * chance.uniform(0.75, 1.25)
            if not self._pause(store, interval):
                return
        self._news = news = time.monotonic()
        # A rank that says nothing by then waits in a collective. It counts as reported, so that no rank waits in vain.
        while not (is_heard := self._is_published or self._settles):
            left = news + self.peer_timeout / 3 - time.monotonic()
            if left <= 0 or not self._pause(store, min(_INTERVAL, left)):
                break
        is_stuck, pause = not is_heard, _SETTLING[0]
        store.add(NUM_REPORTED, 1)
        # Do not ask the store after `stop`: if the store has gone, torch writes a stack to stderr.
        while not self._is_stopping:
            is_settling = self._settles and not self._is_settled
            if not is_settling and not is_stuck and self._known is not None:
                self._pause(store, _INTERVAL)
                continue
            num_reported = store.add(NUM_REPORTED, 0)  # before the rest, which those ranks have sent
            first = RankObservation.from_json(store.get(FIRST))
            num_alike, num_failed = store.add(f"at/{first.place}", 0), store.add(NUM_FAILED, 0)
            self._known = origin = Origin(first, num_alike, num_failed, num_reported, self.world_size)
            if is_stuck and (origin.is_complete or time.monotonic() > news + self.peer_timeout * 2 / 3):
                try:
                    self.on_stuck(origin)
                except Exception as error:
                    warn_user(f"nanwatch: on_stuck raised {spell(error)}", may_raise=False)
                self._leave(store)
                is_stuck = False
            if is_settling and origin.is_complete:
                self._leave(store)
                have_left = store.add(NUM_LEFT, 0) >= self.world_size
                self._is_settled = have_left or time.monotonic() > self._left_at + _FAREWELL
            self._pause(store, pause)
            pause = min(2 * pause, _SETTLING[1])
        self._leave(store)

    def _pause(self, store: Any, seconds: float) -> bool:
        """Let the callers look, wait until one has come, publish what it has. Return whether to go on."""
        with self._looked:
            self._num_looks += 1
            self._looked.notify_all()
        self._wake.wait(seconds)
        self._wake.clear()
        if not self._is_stopping and self._mine is not None and not self._is_published:
            publish(store, self._mine)
            self._is_published = True
        return not self._is_stopping

    def _leave(self, store: Any) -> None:
        if self._left_at == inf:
            self._left_at = time.monotonic()
            store.add(NUM_LEFT, 1)


class _JobConsensus(OriginConsensus):
    """The consensus in one process group, with its count of steps, its barriers before steps, and the last frames.

    Ranks wait at a barrier before each step of an optimizer that has a shard on every rank, so that none steps where
    another has failed. Barriers end once a rank, such as one without a watch, is later than a third of `peer_timeout`.
    """

    def __init__(self, group: Any, peer_timeout: float, name: str) -> None:
        self.group, self.steps = weakref.ref(group), 0
        self._reports: weakref.WeakKeyDictionary[RankCoordinator, Report] = weakref.WeakKeyDictionary()
        self._firsts = weakref.WeakKeyDictionary[RankCoordinator, deque[tuple[int, int]]]()
        rank, size = rank_and_world_size()
        self._barrier_store: Any = None  # a connection to the store
        self._num_barriers, self._may_wait = 0, size <= _MOST_RANKS
        super().__init__(default_store(), rank, size, peer_timeout, name)
        self._handle = after_steps.add(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1

    def first_batches(self, coordinator: RankCoordinator, batch: int) -> deque[tuple[int, int]]:
        """Return the first batch of a watch after each of the latest numbers of steps, for frames that come late.

        All ranks count from the consensus on. At a failure that raises, one may have stopped before a step of others.
        """
        return self._firsts.setdefault(coordinator, deque([(batch, self.steps)], maxlen=_MOST_FIRSTS))

    def arrive(self, *, begins: bool, waits: bool = False) -> bool:
        """Arrive at the next barrier before a step. With `waits`, return whether a rank has failed once all are there.

        `begins`: also if there was no barrier yet.
        """
        begins = begins and any(coordinator.is_sharded for coordinator in _job.coordinators)
        if not begins and not self._num_barriers:
            return False
        self._num_barriers = number = self._num_barriers + 1
        try:
            self._barrier_store = store = self._barrier_store or own_store(self.name, default_store())
            if self._may_wait and store.add(f"step/{number}", 1) == self.world_size:
                store.set(f"step/{number}/all", "")
                store.delete_key(f"step/{number - 1}")
                store.delete_key(f"step/{number - 2}/all")  # each rank has read it
            if self._may_wait and waits:
                store.wait([f"step/{number}/all"], timedelta(seconds=self.peer_timeout / 3))
            return waits and bool(store.check([FIRST]))
        except RuntimeError as error:
            if self._may_wait:
                words = f"steps wait for the other ranks no more: {spell(error)}"
                warn_user(f"nanwatch: {words}", may_raise=False)
            self._may_wait = False
            return False

    def agree(self, patience: float = inf) -> Origin | None:
        """Return the origin once the ranks agree, and end the consensus. None if another watch has done so."""
        with _job.lock:
            if _job.consensus is not self:
                return None
            try:
                return self.settle(patience)
            except RuntimeError as error:  # the store has gone, and nobody knows whose failure it was
                warn_user(f"nanwatch: {spell(error)}", may_raise=False)
                return None
            finally:
                _job.num_settled += 1
                _job.end()

    def raise_failure(self, coordinator: RankCoordinator, cause: BaseException | None = None) -> None:
        """Write this rank's last frames, and raise the error of the other rank."""
        self._write_last_frames()
        if (origin := self.agree()) is None:
            return
        error = PeerNonFiniteError(self._reports.get(coordinator) or Report((), None, None), origin)
        if cause is None:
            raise error
        raise error from cause

    def _write_last_frames(self) -> None:
        """Write the last frames of every watch, once, because later frames are a consequence."""
        for coordinator in list(_job.coordinators):
            if coordinator not in self._reports:
                self._reports[coordinator] = coordinator.last_frames(f"peer-rank-{self.rank}")

    def on_stuck(self, origin: Origin) -> None:
        """Write the last frames, and say for which rank this one waits."""
        self._write_last_frames()
        warn_user(f"nanwatch: rank {self.rank} waits for a rank that has failed: {origin}", may_raise=False)

    def stop(self) -> None:
        self._handle.remove()
        super().stop()


class _Job:
    """State that all watches of this process share that raise."""

    def __init__(self) -> None:
        # The coordinators that have joined and not left.
        self.coordinators: weakref.WeakSet[RankCoordinator] = weakref.WeakSet()
        self.consensus: _JobConsensus | None = None
        # Number of consensuses that have ended by a failure. It is equal on all ranks, because each of them settles.
        self.num_settled = 0
        self.lock = threading.RLock()
        # Id of the latest error, which may end a batch and then the `with`.
        self.waited_for: int | None = None

    def connect(self, coordinator: RankCoordinator) -> _JobConsensus | None:
        """Return the consensus of the present process group; None without one, or in a group of one rank."""
        self.waited_for = None  # the next error may have its id
        group = process_group()
        if group is None or group.size() == 1:
            self.end()
            return None
        # Add it first: otherwise the last of the watches before, when it is collected now, would end the consensus that
        # begins here, and would wait for the lock in the thread that is being started.
        self.coordinators.add(coordinator)
        if (consensus := self.consensus) is None or consensus.group() is not group:
            with self.lock:
                if self.consensus is consensus:  # no other thread was first
                    self.end()
                    self.consensus = _JobConsensus(group, coordinator.peer_timeout, str(self.num_settled))
        return self.consensus

    def leave_if_last(self) -> None:
        if not self.coordinators:
            self.end()

    def end(self) -> None:
        if self.consensus is not None:
            with self.lock:
                consensus, self.consensus = self.consensus, None
                if consensus is not None:
                    consensus.stop()


_job = _Job()


class RankCoordinator:
    """Link between one Watch that raises and the other ranks of the job.

    `last_frames(folder)` returns this rank's latest frames as a report without a finding, and writes them into
    `output_dir`, if there is one, as `folder`. With a `peer_timeout` of 0 there is no link.
    """

    def __init__(self, model: nn.Module, peer_timeout: float, last_frames: Callable[[str], Report]) -> None:
        self.last_frames, self.peer_timeout, self._part = last_frames, peer_timeout, _part(model)
        self.is_sharded = False  # each rank steps a part of the model, and reads a part of the gradients
        self._is_open = peer_timeout > 0
        self._published: _JobConsensus | None = None
        weakref.finalize(self, _job.leave_if_last)

    def batch_started(self, batch: int) -> None:
        """Join the consensus. Raises PeerNonFiniteError when another rank has failed; see `check`."""
        if self._is_open and (consensus := _job.connect(self)) is not None:
            firsts = consensus.first_batches(self, batch)
            if consensus.steps != firsts[-1][1]:
                firsts.append((batch, consensus.steps))
            self.check()

    def check(self) -> None:
        """Raise PeerNonFiniteError when another rank failed a second ago, unless this watch has left the job."""
        consensus = _job.consensus
        if consensus is not None and consensus.pending() and self in _job.coordinators:
            consensus.raise_failure(self)

    def publish(self, finding: Finding) -> None:
        """Publish this rank's finding, before anything slow."""
        self._published = consensus = _job.connect(self) if self._is_open else None
        if consensus is not None:
            firsts = consensus.first_batches(self, finding.batch)
            first, steps = next((pair for pair in reversed(firsts) if pair[0] <= finding.batch), firsts[0])
            clock = steps, max(0, finding.batch - first)
            consensus.publish(finding, finding.sequence or 0, clock, self._part)
            consensus.arrive(begins=finding.phase in ("backward", "step"))

    def await_step(self) -> None:
        """Wait until all ranks begin this step. Raises PeerNonFiniteError where one of them has failed instead."""
        self.is_sharded, consensus = True, _job.consensus
        if self._is_open and consensus is not None and consensus.arrive(begins=True, waits=True):
            consensus.raise_failure(self)

    def settle(self, patience: float) -> Origin | None:
        """Return the origin on which the ranks agree, as far as they do so in `patience` seconds. End the consensus.

        Returns None without other ranks, and when no finding was published since the latest agreement.
        """
        published, self._published = self._published, None
        return published.agree(patience) if self._is_open and published is not None else None

    def explain(self, error: BaseException | None) -> None:
        """Raise PeerNonFiniteError from an error that ends a batch or a run, if another rank's failure is behind it.

        A collective whose peer has gone fails before this rank knows why, so wait up to 2 s for news after its error.
        """
        consensus = _job.consensus
        if consensus is None or not self._is_open or error is None or isinstance(error, NonFiniteError):
            return
        is_told = isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
        is_of_collective = is_told or isinstance(error, torch.distributed.DistError)
        if is_of_collective and id(error) != _job.waited_for:
            _job.waited_for = id(error)
            until = time.monotonic() + _NEWS
            while not consensus.pending() and not consensus.trouble and time.monotonic() < until:
                time.sleep(0.05)
        if consensus.pending():
            consensus.raise_failure(self, error)

    def close(self) -> None:
        """Leave the job for good. The last one ends the consensus."""
        self._is_open = False
        _job.coordinators.discard(self)
        _job.leave_if_last()


def _part(model: nn.Module) -> str:
    """Return a hash that replicas and shards of one model share, and that differs between stages of a pipeline."""
    names = "\n".join(f"{name} {type(module).__name__}" for name, module in each_module(model))
    return hashlib.blake2b(names.encode(errors="backslashreplace"), digest_size=8).hexdigest()
