"""Coordination with the other ranks of the job: publish this rank's failure, and raise when another rank failed first.

All watches of a process share one OriginConsensus: if one fails, the job has failed. The consensus begins with the
first batch after `init_process_group`. After this rank has raised, the next batch begins another one. The keys of the
store contain its number, which is equal on all ranks: a rank that comes late finds each consensus that the others have
settled, and settles it too.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ..instrumentation.global_hooks import after_steps
from ..report.finding import Finding, Origin
from ..report.report import NonFiniteError, Report, report_of
from ..util.job import rank_and_world_size
from ..util.modules import each_module
from ..util.visible import spell, warn_user
from .consensus import OriginConsensus, PeerNonFiniteError, StoreProtocol

# Seconds until this rank knows of a failure elsewhere: it looks at the store about once a second.
_NEWS = 2.0
# gloo raises RuntimeError, as nearly everything in PyTorch does. So an error of a collective is recognised by words of
# its message.
_WORDS = ("gloo", "by peer", "NCCL", "ProcessGroup", "c10d", "Timed out waiting", "Socket closed")
# A meeting before a step sends three short messages a rank, and the store answers 55,000 a second.
_MOST_RANKS, _MOST_FIRSTS = 1024, 64


class RankCoordinator:
    """Link between one Watch that raises and the other ranks of the job.

    `last_frames(folder)` returns this rank's latest frames as a report without a finding, and writes them into
    `output_dir`, if there is one, as `folder`. With a `peer_timeout` of 0 there is no link.
    """

    def __init__(self, model: nn.Module, peer_timeout: float, last_frames: Callable[[str], Report]) -> None:
        self.last_frames, self._part = last_frames, _part(model)
        self._peer_timeout = peer_timeout
        # The first batch after each of the latest numbers of optimizer steps, for rows that come late.
        self._firsts: deque[tuple[int, int]] = deque([(0, 0)], maxlen=_MOST_FIRSTS)
        self.is_sharded = False  # each rank steps a part of the model, and reads a part of the gradients
        self._is_open = peer_timeout > 0
        self._counted: OriginConsensus | None = None  # whose steps `_firsts` counts
        self._published: OriginConsensus | None = None
        weakref.finalize(self, _job.leave_if_last)

    def batch_started(self, batch: int) -> None:
        """Join the consensus. Raises PeerNonFiniteError when another rank has failed; see `check`."""
        if not self._is_open or self._connect(batch) is None:
            return
        if _job.steps != self._firsts[-1][1]:
            self._firsts.append((batch, _job.steps))
        self.check()

    def check(self) -> None:
        """Raise PeerNonFiniteError when another rank failed a second ago, unless this watch has left the job."""
        consensus = _job.consensus
        if consensus is None or not consensus.pending() or self not in _job.coordinators:
            return
        if (error := _job.failed_elsewhere(self)) is not None:
            raise error

    def publish(self, finding: Finding) -> None:
        """Publish this rank's finding, before anything slow."""
        if not self._is_open:
            return
        self._published = consensus = self._connect(finding.batch)
        if consensus is not None:
            consensus.publish(finding, finding.sequence or 0, self._clock(finding.batch), self._part)
            _job.arrive(begins=finding.phase in ("backward", "step"))

    def await_step(self) -> None:
        """Wait until all ranks begin this step. Raises PeerNonFiniteError where one of them has failed instead."""
        self.is_sharded = True
        meeting = _job.arrive(begins=True) if self._is_open else None
        if meeting is not None and meeting.wait() and (error := _job.failed_elsewhere(self)) is not None:
            raise error

    def settle(self, patience: float) -> Origin | None:
        """Return the origin on which the ranks agree, as far as they do so in `patience` seconds. End the consensus.

        Returns None without other ranks, and when no finding was published since the latest agreement.
        """
        published, self._published = self._published, None
        return _job.settle(published, patience) if self._is_open and published is not None else None

    def explain(self, error: BaseException | None) -> None:
        """Raise PeerNonFiniteError from an error that ends a batch or a run, if another rank's failure is behind it.

        A collective whose peer has gone fails before this rank knows why. Only after such an error this waits up to 2 s
        for news.
        """
        consensus = _job.consensus
        if consensus is None or not self._is_open or error is None or isinstance(error, NonFiniteError):
            return
        if id(error) != _job.waited_for and _is_of_collective(error):
            _job.waited_for = id(error)
            until = time.monotonic() + _NEWS
            while not consensus.pending() and not consensus.trouble and time.monotonic() < until:
                time.sleep(0.05)
        if consensus.pending() and (failure := _job.failed_elsewhere(self)) is not None:
            raise failure from error

    def close(self) -> None:
        """Leave the job for good. The last one ends the consensus."""
        self._is_open = False
        _job.coordinators.discard(self)
        _job.leave_if_last()

    def _connect(self, batch: int) -> OriginConsensus | None:
        consensus = _job.connect(self, self._peer_timeout)
        if self._counted is not consensus:
            # Count from here on all ranks: at a failure that raises, one stopped before a step that others had made.
            self._counted = consensus
            self._firsts = deque([(batch, _job.steps)], maxlen=_MOST_FIRSTS)
        return consensus

    def _clock(self, batch: int) -> tuple[int, int]:
        first, steps = next((pair for pair in reversed(self._firsts) if pair[0] <= batch), self._firsts[0])
        return steps, max(0, batch - first)


class StepMeeting:
    """Meeting of all ranks before each step of an optimizer, so that none steps where another has failed.

    There are no more meetings once a rank has not come within `timeout` seconds, as one without a watch.
    """

    def __init__(self, consensus: OriginConsensus, timeout: float) -> None:
        self._num_ranks, self._timeout = consensus.world_size, timeout
        self._store = consensus.own_store()
        self._number = 0
        self._is_open = self._num_ranks <= _MOST_RANKS

    def arrive(self) -> None:
        """Come to the next meeting, and wait for nobody."""
        if not self._is_open:
            return
        self._number += 1
        try:
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
            return StoreProtocol(self._store, self._num_ranks).has_news()
        except RuntimeError as error:
            self._end(error)
            return False

    def _end(self, error: RuntimeError) -> None:
        if self._is_open:
            self._is_open = False
            warn_user(f"nanwatch: steps wait for the other ranks no more: {spell(error)}", may_raise=False)


class _Job:
    """State that all watches of this process share that raise."""

    def __init__(self) -> None:
        self.steps = 0
        self._peer_timeout = 0.0
        # Those that have joined, and not left.
        self.coordinators: weakref.WeakSet[RankCoordinator] = weakref.WeakSet()
        self._reports: weakref.WeakKeyDictionary[RankCoordinator, Report] = weakref.WeakKeyDictionary()
        self.consensus: OriginConsensus | None = None
        self._meeting: StepMeeting | None = None
        self._group: Callable[[], Any] = lambda: None
        # Number of consensuses that have ended by a failure. It is equal on all ranks, because each of them settles.
        self._num_settled = 0
        self._lock = threading.RLock()
        self._handle: Any = None
        # Id of the latest error, which may end a batch and then the `with`.
        self.waited_for: int | None = None

    def connect(self, coordinator: RankCoordinator, peer_timeout: float) -> OriginConsensus | None:
        """Return the consensus of the present process group; None without one, or in a group of one rank."""
        self.waited_for = None  # the next error may have its id
        group = _group()
        if group is None:
            if self.consensus is not None:
                self._end()
            return None
        # Add it first: otherwise the last of the watches before, when it is collected now, would end the consensus that
        # begins here, and would wait for the lock in the thread that is being started.
        self.coordinators.add(coordinator)
        if self.consensus is None or self._group() is not group:
            with self._lock:
                if self.consensus is None or self._group() is not group:  # no other thread was first
                    self._begin(group, peer_timeout)
        return self.consensus

    def _begin(self, group: Any, peer_timeout: float) -> None:
        self._end()
        self.steps = 0
        self._peer_timeout = peer_timeout
        self._group = weakref.ref(group)
        place, name = rank_and_world_size(), str(self._num_settled)
        self.consensus = OriginConsensus(None, *place, peer_timeout, name=name, on_stuck=self._stuck)
        self._handle = after_steps.add(self._stepped)

    def arrive(self, *, begins: bool) -> StepMeeting | None:
        """Come to the next meeting before a step, and return it. `begins`: where there was none yet, too."""
        is_sharded = any(coordinator.is_sharded for coordinator in self.coordinators)
        if self.consensus is not None and self._meeting is None and begins and is_sharded:
            self._meeting = StepMeeting(self.consensus, self._peer_timeout / 3)
        if self._meeting is not None:
            self._meeting.arrive()
        return self._meeting

    def leave_if_last(self) -> None:
        """End the consensus if no watch is left."""
        if not self.coordinators:
            self._end()

    def settle(self, published: OriginConsensus | None = None, patience: float = torch.inf) -> Origin | None:
        """Return the origin once the ranks agree, None if another watch has settled `published`."""
        with self._lock:
            consensus = self.consensus
            if consensus is None or published not in (None, consensus):
                return None
            try:
                return consensus.settle(patience)
            except RuntimeError as error:  # the store has gone, and nobody knows whose failure it was
                warn_user(f"nanwatch: {spell(error)}", may_raise=False)
                return None
            finally:
                self._num_settled += 1
                self._end()

    def failed_elsewhere(self, coordinator: RankCoordinator) -> PeerNonFiniteError | None:
        """Write this rank's last frames, and return the error of the other rank."""
        self._write_last_frames()
        # Before the end of the consensus lets go of it.
        report = self._reports.get(coordinator) or report_of(())
        origin = self.settle()
        return None if origin is None else PeerNonFiniteError(report, origin)

    def _write_last_frames(self) -> None:
        """Write the last frames of every watch, once, because later frames are a consequence."""
        for coordinator in list(self.coordinators):
            if coordinator not in self._reports:
                self._reports[coordinator] = coordinator.last_frames(f"peer-rank-{rank_and_world_size()[0]}")

    def _stuck(self, origin: Origin) -> None:
        """Write the last frames in the consensus's thread, while this rank waits in a collective for a failed one."""
        self._write_last_frames()
        here = rank_and_world_size()[0]
        warn_user(f"nanwatch: rank {here} waits for a rank that has failed: {origin}", may_raise=False)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1

    def _end(self) -> None:
        with self._lock:
            if self.consensus is None:
                return
            consensus, self.consensus, self._meeting = self.consensus, None, None
            self._handle.remove()
            self._group = lambda: None
            self._reports.clear()
            consensus.stop()


_job = _Job()


def _is_of_collective(error: BaseException) -> bool:
    is_distributed = isinstance(error, torch.distributed.DistError)
    return is_distributed or (isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS))


def _group() -> Any:
    """Return the default process group, if it has more than one rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.group.WORLD if distributed.get_world_size() > 1 else None


def _part(model: nn.Module) -> str:
    """Return a hash that replicas and shards of one model share, and that differs between stages of a pipeline."""
    names = "\n".join(f"{name} {type(module).__name__}" for name, module in each_module(model))
    return hashlib.blake2b(names.encode(errors="backslashreplace"), digest_size=8).hexdigest()
