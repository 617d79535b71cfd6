"""Watching of backwards: find the first non-finite gradient, and stop the optimizer's step that would take it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import find_module, named_modules
from ..recording.backward import Arrival, BackwardCall, find_in_backward
from ..recording.events import Recorder
from ..recording.job import rank
from ..recording.observe import observe
from ..report.finding import finding_of
from ..report.frame import FrameRows
from ..report.record import Row, is_fault
from ..report.report import Report
from ..util.modules import each_parameter
from .optimizer_guard import OptimizerGuard, Weight
from .reports import Reports

if TYPE_CHECKING:
    from .failure_handler import FailureHandler

_ADDED_UP = (
    "every gradient that was added up there was finite; the sum of several backwards, in .grad, is not"
)
_REDUCED = (
    "what this rank holds of the gradient, summed over ranks and backwards, is not finite; in the backward itself this"
    " rank saw no gradient that was so"
)


class BackwardWatch:
    """Part of a Watch with `gradients`: defers the failure of a backward to the guard, and asks it before each step.

    A failure that is due goes to `failures`. The backward or the step raises what that raises.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        reports: Reports,
        failures: FailureHandler,
        guard: OptimizerGuard,
    ) -> None:
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._reports = reports
        self._failures = failures
        self.guard = guard

    def remove(self) -> None:
        """Look at no more gradients."""
        self.settle()
        if (model := self._model()) is not None:
            self._recorder.forget_gradients(list(each_parameter(model)))

    def settle(self) -> None:
        """Make frames of backwards that ended by an exception, and find out whether the deferred step was skipped."""
        self._recorder.finish_broken_backwards()
        self.guard.settle()

    def ended(self, calls: list[BackwardCall], arrivals: list[Arrival], scale: object) -> None:
        """Defer the failure of a backward whose frames are not kept yet. `scale` is the guard's `note_scale`."""
        calls = [BackwardCall(*call) for call in calls]
        fault = find_in_backward(calls, [Arrival(*one) for one in arrivals], rank=rank())
        # The gradients of a non-finite forward are its consequence.
        if fault is None or fault.finding.batch in self._failures.batches:
            return
        batch = fault.finding.batch
        # The recorder keeps and counts the frames of a backward after this call.
        num_before, place = self._recorder.frames_of_batch(batch), fault.finding.sequence
        sequence = None if num_before is None or place is None else num_before + place
        finding = replace(fault.finding, sequence=sequence)
        report = self._reports.latest(finding, batch, fault.frames)
        nonfinite = [(call.frame, row) for call in calls for row in call.frame.rows if is_fault(row)]
        self._defer(report, batch, nonfinite, scale)

    def before_step(self, optimizer: Optimizer) -> None:
        """Stop a step that is about to change the weights with a non-finite gradient."""
        recorder, guard = self._recorder, self.guard
        if recorder.paused:
            return
        if torch._C._current_graph_task_id() != -1:
            # This optimizer steps inside the backward, as soon as a gradient is there.
            recorder.finish_nonfinite_backward()
        # FSDP puts gradients that it has reduced over the ranks into .grad itself, where no hook sees them.
        if guard.pending is None and (recorder.gradient_sums_may_overflow or recorder.gathers_weights):
            recorder.forget_gradient_sums()
            self._check_sums()
        guard.settle_late()
        due = guard.check_step(optimizer)
        if due is not None:
            self._failures.step_follows(due)
        elif guard.pending is None:
            self._failures.rerun.let_go()

    def _check_sums(self) -> None:
        """Defer a failure of finite gradients that have added up to a non-finite value in a weight's `.grad`."""
        model, batch = self._model(), self._recorder.latest_batch
        nonfinite: list[tuple[FrameRows, Row]] = []
        for name, _, module in () if model is None else named_modules(model):
            for label, x in module._parameters.items():
                if x is not None and x.grad is not None:
                    row = observe(x.grad, f"{label}.grad", "gradient")
                    if is_fault(row):
                        kind = type(module).__name__
                        nonfinite.append((FrameRows(batch, name, kind, [row], False, "backward"), row))
        if not nonfinite:
            return
        frame = nonfinite[0][0].to_frame()
        sequence = self._recorder.frames_of_batch(batch)
        finding = finding_of(frame, frame.records[0], "produced", None, rank(), sequence)
        remark = _REDUCED if frame.records[0].is_shard else _ADDED_UP
        report = self._reports.latest(replace(finding, remarks=(remark,)), batch, [nonfinite[0][0]])
        self._defer(report, batch, nonfinite)

    def _defer(
        self, report: Report, batch: int, nonfinite: list[tuple[FrameRows, Row]], scale: object = None
    ) -> None:
        self._failures.rerun.backward_failed(batch)
        batches = {frame.batch for frame, _ in nonfinite}
        due = self.guard.defer(report, batches, self._weights(nonfinite), scale)
        if due is not None:
            self._failures.step_follows(due)

    def _weights(self, nonfinite: list[tuple[FrameRows, Row]]) -> set[Weight]:
        """Return the weights among these rows."""
        model = self._model()
        found: set[Weight] = set()
        for frame, row in nonfinite:
            name = row.label.removesuffix(".grad")
            owner = None if model is None else find_module(model, frame.name)
            if owner is not None and name in owner.module._parameters:
                found.add((weakref.ref(owner.module), name))
        return found
