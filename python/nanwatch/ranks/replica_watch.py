"""Comparison of replicas while a run goes on: fingerprints in the thread of the run, everything else in a thread.

A check takes the fingerprints when a batch begins that follows a step of the optimizer: no weight is half written then.
Only the thread talks to the store. What it finds waits for the next batch, which tells it.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps
from ..recording.events import WatchPart
from ..records.record import Frame
from ..report.replica import ReplicaDifference
from ..util.modules import each_parameter
from ..util.visible import spell, suppressed, suppressing, warn_user
from .replica_bytes import MOST_BYTES, Copy
from .replica_thread import FAREWELL, ReplicaThread
from .replicas import Fingerprints, Held, Replicas

_OPTIMIZER = "(optimizer)"
_SPARE = 8  # batches: a difference is heard of some time after its check


class ReplicaWatch(WatchPart):
    """Part of a Watch with `replicas`: compares what the ranks should hold alike, every `every` steps.

    `tell(difference)` is called in the thread of the run, when a batch begins or the watch ends. `timeout` are the
    seconds that ranks wait for each other after a difference. No error of this leaves it.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        timeout: float,
        output_dir: Path | None,
        tell: Callable[[ReplicaDifference], object],
    ) -> None:
        self._every, self._timeout, self._output_dir, self._tell = every, timeout, output_dir, tell
        self.differences: deque[ReplicaDifference] = deque(maxlen=16)
        self._model = weakref.ref(model)
        self._replicas = Replicas(model)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._pid = os.getpid()
        self._has_stepped = False
        self._step = 0  # batches that followed a step of the optimizer
        self._begun = 0.0
        self._batch = 0
        self._history: dict[int, dict[str, int]] = {}
        self._is_off = self._has_warned = False
        self._thread: ReplicaThread | None = None
        this = weakref.ref(self)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (own := this()) is not None and not own._has_stepped:
                own._stepped(optimizer)

        self._hooks = Handles(self, [after_steps.add(after)])

    @_disable_dynamo
    def _stepped(self, optimizer: Optimizer) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._optimizers.get(optimizer)
        if known is None or (known[0] != count and not known[1]):
            model = self._model()
            held = {id(x) for group in optimizer.param_groups for x in group["params"]}
            # A float32 copy of the weights does not say which weight it belongs to.
            is_own = model is not None and any(id(x) in held for x in each_parameter(model))
            known = self._optimizers[optimizer] = count, is_own
        self._has_stepped = known[1]

    def on_frame(self, frame: Frame) -> None:
        """Keep the fingerprints of weights and states, to find the batch in which a difference began."""
        kept = self._history.setdefault(frame.batch, {})
        if len(self._history) > 2 * self._every + _SPARE:
            self._history.pop(min(self._history), None)
        for row in frame.records:
            if row.role in ("weight", "buffer") and row.fingerprint is not None:
                is_prefixed = frame.name and frame.name != _OPTIMIZER
                kept[f"{frame.name}.{row.label}" if is_prefixed else row.label] = row.fingerprint

    def batch_started(self, batch: int, module: nn.Module | None = None, args: tuple[Any, ...] = ()) -> None:
        """Take the fingerprints, if a check is due, and tell of differences. Never raises."""
        if self._is_off or os.getpid() != self._pid:
            return
        self._batch = batch
        try:
            if self._has_stepped and not _is_captured():
                self._has_stepped = False
                self._begun = self._begun or time.monotonic()
                self._step += 1
                if self._step % self._every == 0:
                    self._check(batch)
                if self._thread is not None:
                    self._thread.step = self._step
                    self._copy_wanted(self._thread)
        except Exception as error:
            self._fail(error)
        self._tell_all()

    def _check(self, batch: int) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self._warn_of_none("torch.distributed is not initialized in this process")
            return
        held = self._replicas.held(list(self._optimizers))
        if not held:
            self._warn_of_none(
                "neither DistributedDataParallel nor a replicated DTensor says which ranks hold the same"
            )
            return
        if self._thread is None or self._thread.is_gone():
            self._thread = ReplicaThread(self._every, self._timeout, self._output_dir)
            weakref.finalize(self, self._thread.stop).atexit = False
        seconds = max(1e-6, (time.monotonic() - self._begun) / self._step)
        self._thread.put(self._step // self._every, batch, Fingerprints(held), seconds)

    def _warn_of_none(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"nanwatch compares no replicas so far, as {why}", may_raise=False)

    def _copy_wanted(self, thread: ReplicaThread, *, at_end: bool = False) -> None:
        """Copy the tensor that the thread waits for, if this is the step of it, or the run ends."""
        wanted = thread.wanted
        if wanted is None or (self._step < wanted.at and not at_end):
            return
        thread.wanted = None
        held = self._replicas.held(list(self._optimizers))
        one = next((one for one in held if (one.ranks, one.name) == (wanted.ranks, wanted.name)), None)
        wanted.copies.put(None if one is None else self._copied(one))

    def _copied(self, one: Held) -> Copy | None:
        x = one.tensor.detach()
        if x.numel() * x.element_size() > MOST_BYTES or x.layout is not torch.strided:
            return None
        with torch.no_grad():
            host = x.to("cpu", copy=True)
        prints = {batch: kept[one.name] for batch, kept in self._history.items() if one.name in kept}
        return Copy(self._step, host, prints)

    def _tell_all(self) -> None:
        while self._thread is not None and self._thread.found:
            difference = self._thread.found.popleft()
            self.differences.append(difference)
            self._tell(difference)

    def _fail(self, error: Exception) -> None:
        suppressed("replicas could not be compared")
        self._is_off = True
        warn_user(f"nanwatch compares replicas no more: {spell(error)}", may_raise=False)

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        self._hooks.remove()
        self.batch_started(self._batch)
        thread = self._thread
        if thread is not None and os.getpid() == self._pid:
            thread.stop()
            until = time.monotonic() + 2 * FAREWELL
            while thread.is_alive() and time.monotonic() < until:
                with suppressing("a tensor could not be copied at the end"):
                    self._copy_wanted(thread, at_end=True)
                thread.join(0.02)
        self._tell_all()
        self._is_off = True


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
