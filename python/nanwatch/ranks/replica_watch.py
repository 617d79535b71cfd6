"""Comparison of replicas while a run goes on.

A check takes the fingerprints when a batch begins that follows a step of the optimizer: no weight is half written then.
The first batches after it ask whether another rank had other fingerprints.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps
from ..recording.events import WatchPart
from ..report.events import ReplicaDifference
from ..util.modules import each_parameter
from ..util.visible import spell, warn_user
from .exchange import Comparison, Ranks, Verdict
from .replicas import Replicas, fingerprints, judge

_MOST_NAMES = 100
_KEPT = 8  # checks, whose batches are known


class ReplicaWatch(WatchPart):
    """Part of a Watch with `replicas`: compares what the ranks should hold alike, every `every` steps.

    `tell(difference)` is called in the thread of the run, when a batch begins or the watch ends. `timeout` are the
    seconds that a difference waits for ranks that do not answer. No error of this leaves it.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        timeout: float,
        tell: Callable[[ReplicaDifference], object],
    ) -> None:
        self._every, self._timeout, self._tell = every, timeout, tell
        self.differences: deque[ReplicaDifference] = deque(maxlen=16)
        self._model = weakref.ref(model)
        self._replicas = Replicas(model)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._pid = os.getpid()
        self._has_stepped = False
        self._batch = 0
        self._step = 0  # batches that followed a step of the optimizer
        self._batches: dict[int, int] = {}  # by check
        self._has_warned = False
        self._comparison: Comparison | None = None
        this = weakref.ref(self)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (watch := this()) is not None and not watch._has_stepped:
                watch._stepped(optimizer)

        self._hooks = Handles(self, [after_steps.add(after)])

    @_disable_dynamo
    def _stepped(self, optimizer: Optimizer) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._optimizers.get(optimizer)
        if known is None or (known[0] != count and not known[1]):
            model = self._model()
            parameters = {id(x) for group in optimizer.param_groups for x in group["params"]}
            # A float32 copy of the weights does not say which weight it belongs to.
            is_models = model is not None and any(id(x) in parameters for x in each_parameter(model))
            known = self._optimizers[optimizer] = count, is_models
        self._has_stepped = known[1]

    def batch_started(self, batch: int, module: nn.Module | None = None, args: tuple[Any, ...] = ()) -> None:
        """Take the fingerprints, if a check is due, and tell of differences."""
        if not self._has_stepped or os.getpid() != self._pid or _is_captured():
            return
        self._has_stepped, self._batch = False, batch
        self._step += 1
        if self._comparison is not None:
            self._tell_all(self._comparison.look())
        if self._step % self._every == 0:
            self._check(batch)

    def _check(self, batch: int) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self._warn_once(
                "compares no replicas so far, as torch.distributed is not initialized in this process"
            )
            return
        tensors = self._replicas.held(list(self._optimizers))
        if not tensors:
            self._warn_once(
                "compares no replicas so far, as neither DistributedDataParallel nor a replicated DTensor says which"
                " ranks hold the same"
            )
            return
        if self._comparison is None or (self._comparison.is_over and self._comparison.error is None):
            self._comparison = Comparison("replicas", judge, self._timeout)
        number = self._step // self._every
        self._batches = {number: batch, **dict(list(self._batches.items())[: _KEPT - 1])}
        for ranks, values in fingerprints(tensors).items():
            self._comparison.post(ranks, number, values, {})
        if self._comparison.error is not None:
            self._warn_once(f"compares replicas no more: {spell(self._comparison.error)}")

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"nanwatch {why}", may_raise=False)

    def _tell_all(self, verdicts: list[tuple[int, Ranks, Verdict]]) -> None:
        for number, ranks, verdict in verdicts:
            if not verdict["names"]:
                continue
            difference = ReplicaDifference(
                step=number * self._every,
                equal_at=(number - 1) * self._every,
                tensors=tuple(verdict["names"][:_MOST_NAMES]),
                num_tensors=len(verdict["names"]),
                ranks=tuple(verdict["ranks"]),
                num_odd=verdict["num_odd"],
                hosts=tuple(verdict["hosts"]),
                num_ranks=verdict["num_ranks"],
                size=len(ranks),
                is_majority=verdict["is_majority"],
                batch=self._batches.get(number, 0),
            )
            self.differences.append(difference)
            self._tell(difference)

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        self._hooks.remove()
        self.batch_started(self._batch)
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            self._tell_all(comparison.end())


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
