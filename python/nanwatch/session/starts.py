"""Starts of batches, from which a failed one is run again: what is kept of each, and for how long."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..diagnosis.batch_snapshot import BatchSnapshot, BufferHistory, draws_outside_torch
from ..diagnosis.loss_statements import BackwardCall
from ..instrumentation.execution_context import RngState
from ..recording.events import Event, Recorder, Start
from ..report.finding import Finding
from ..util.visible import suppressed
from .options import Options

_NO_MODULE = nn.Module()


class ModelRef:
    """Weak reference to a watched model.

    Once the model is gone it returns a module with those of its children that are left: a list of model and loss may
    live for no longer than the call of `watch`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._children = {key: weakref.ref(x) for key, x in model._modules.items() if x is not None}

    def __call__(self) -> nn.Module | None:
        """Return the model or what is left of it; None once all is gone."""
        if (model := self._model()) is not None:
            return model
        rest = nn.Module()
        children = ((key, reference()) for key, reference in self._children.items())
        rest._modules.update({key: child for key, child in children if child is not None})
        return rest if rest._modules else None


class Starts:
    """Starts of the batches of a Watch. The recorder keeps them, and asks `batch_started` for what Python has of them.

    The start of a batch whose backward has failed, and that backward, are kept until a step was checked.
    """

    def __init__(self, model: ModelRef, recorder: Recorder, options: Options) -> None:
        self._model, self._recorder = model, recorder
        self._is_on = recorder.keeps_starts = options.reruns
        # For each batch of a model whose code may draw from random or numpy.random.
        self._entries = recorder.subscribe(Event.BATCH_START)
        self._entries.active = False
        if self._is_on:
            recorder.watch_generators(vars(torch.cuda))
        self._buffers = BufferHistory()
        self._draws: bool | None = None
        # The start refers to `_NO_MODULE`, as a model that keeps this would keep itself. Its graph may be gone.
        self._failed: tuple[int, weakref.ref[nn.Module], BatchSnapshot] | None = None
        self._backwards: dict[int, BackwardCall] = {}  # by batch
        # The CPU's random state at the last step: what a loss draws before it calls the model, it draws from there.
        self._generator: Tensor | None = None

    def batch_started(self, module: nn.Module) -> object:
        """Return what the start of a batch has beside the recorder's part."""
        if not self._is_on:
            return None
        try:
            watched = self._model()
            model = module if watched is None else watched  # a module's truth is its own
            if self._draws is None:
                self._draws = self._entries.active = draws_outside_torch(model)
            buffers = self._buffers.note(model)
            self._recorder.watch_buffers(self._buffers.names())
            return buffers, RngState.capture(others=True).others if self._draws else ()
        except Exception:
            suppressed("the values of buffers could not be kept for a re-run")
            return None

    def written(self) -> set[int]:
        """Return the ids of the tensors that this thread's batch was called with and that were written to since."""
        start = self._recorder.start()
        return set() if start is None else {id(x) for x, version in start.versions if x._version != version}

    def let_go(self) -> None:
        """Let go of all that was kept for a backward, as a step takes its gradients."""
        self._recorder.forget_starts()
        self._generator = torch.get_rng_state() if self._is_on else None  # 3 µs
        self._backwards.clear()
        self._failed = None

    def keep(self, batch: int) -> None:
        """Keep the start of the batch until a step takes the gradients, also when its graph is gone."""
        if (start := self.of_ended(batch)) is not None:
            self._failed = batch, weakref.ref(start.module), replace(start, module=_NO_MODULE)

    def backward_failed(self, batch: int) -> None:
        """Keep the start of the batch, and the backward under way, until a step takes the gradients."""
        self.keep(batch)
        # A later call is a part of what lies behind this one's outputs.
        starts = [start for start in self._recorder.ended_starts() if start.batch <= batch]
        if all(start.batch != batch for start in starts):
            return
        try:
            first = min(starts, key=lambda x: x.batch)
            generators = [x for x in (self._generator, first.generator) if x is not None]
            rngs = [RngState(generator, first.cuda) for generator in generators]
            if (call := BackwardCall.capture(rngs)) is not None:
                self._backwards[batch] = call
        except Exception:
            suppressed("the statements of the loss could not be kept")

    def of_ended(self, batch: int) -> BatchSnapshot | None:
        """Return the start of a batch that has ended, if it is kept for its backward."""
        if self._failed is not None and self._failed[0] == batch:
            _, reference, snapshot = self._failed
            return None if (module := reference()) is None else replace(snapshot, module=module)
        starts = [_snapshot(start) for start in self._recorder.ended_starts() if start.batch == batch]
        return next(filter(None, starts), None)

    def of(self, finding: Finding) -> tuple[BatchSnapshot | None, BackwardCall | None]:
        """Return the start of the failed batch of this thread, and its backward where that has failed."""
        if finding.phase == "backward":
            return self.of_ended(finding.batch), self._backwards.get(finding.batch)
        start = self._recorder.start()
        return None if start is None else _snapshot(start), None


def _snapshot(start: Start) -> BatchSnapshot | None:
    """Return the start as a re-run takes it; None once its module is gone or it is not kept."""
    if start.module is None:
        return None
    buffers, others = start.extra or ({}, ())
    return BatchSnapshot.of(start, buffers, RngState(start.generator, start.cuda, others))
