"""Backwards and optimizer steps of a Watch: what it does between one forward and the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps, before_steps
from ..instrumentation.wrapped_names import find_module, named_modules, parameter_names
from ..recording.backward import find_in_backward
from ..recording.events import Arrival, BackwardCall
from ..recording.observe import observe
from ..report.finding import find, finding_of
from ..report.frame import FrameRows
from ..report.record import Row, is_fault
from ..report.report import Report
from ..util.modules import each_parameter
from .nonfinite_batches import NonFiniteBatches
from .optimizer_guard import OptimizerGuard, SkippedStep, Weight
from .options import Options
from .reports import Reports

# Name of the frames of an optimizer's state.
_OPTIMIZER = "(optimizer)"
_ADDED_UP = (
    "every gradient that was added up there was finite; the sum of several backwards, in .grad, is not"
)
_REDUCED = (
    "what this rank holds of the gradient, summed over ranks and backwards, is not finite; in the backward itself this"
    " rank saw no gradient that was so"
)


class BackwardWatch:
    """Defers the failure of a backward until a step is about to take it; looks at an optimizer's state after its steps.

    `act(report)` is called when a failure is due: what it raises, the step raises. `failed(batch)` is called before a
    backward of the batch is held, `let_go()` when a step finds nothing held.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Any,
        options: Options,
        reports: Reports,
        *,
        rank: Callable[[], int],
        act: Callable[[Report], None],
        failed: Callable[[int], None],
        let_go: Callable[[], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._options = options
        self._reports = reports
        self._rank = rank
        self._act = act
        self._failed = failed
        this = weakref.ref(self)
        self._guard: OptimizerGuard | None = None
        self._state: OptimizerState | None = None
        if options.gradients and options.enabled:
            self._guard = OptimizerGuard(
                recorder,
                act,
                let_go,
                lambda: None if (own := this()) is None else own._look_at_sums(),
                scaler=options.scaler,
                max_skipped_steps=options.max_skipped_steps,
            )
        if options.optimizer is not None and options.enabled:
            self._node = recorder.add_node(_OPTIMIZER, options.optimizer, False, False)
            self._state = OptimizerState(
                options.optimizer,
                model,
                lambda rows: None if (own := this()) is None else own._state_seen(rows),
            )

    def remove(self) -> None:
        """Look at no more steps and no more gradients."""
        self.settle()
        for one in (self._guard, self._state):
            if one is not None:
                one.remove()
        model = self._model()
        if self._guard is not None and model is not None:
            self._recorder.forget_gradients(list(each_parameter(model)))

    def settle(self) -> None:
        """Make frames of backwards that ended by an exception; see whether what is held was skipped meanwhile."""
        if self._guard is not None:
            self._recorder.finish_broken_backwards()
            self._guard.settle()

    @property
    def held(self) -> Report | None:
        """The report of the backward whose failure no step has been about to take, so far."""
        return None if self._guard is None else self._guard.pending

    def release(self) -> Report | None:
        """Return that report, and drop it."""
        return None if self._guard is None else self._guard.release()

    @property
    def skipped(self) -> tuple[SkippedStep, ...]:
        """The latest of the steps that were skipped."""
        return () if self._guard is None else tuple(self._guard.skipped)

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped."""
        return 0 if self._guard is None else self._guard.num_skipped

    def started(self) -> None:
        """Note that a backward has begun: find out whether the gradients of the one before are gone."""
        if self._guard is not None:
            self._guard.settle()

    def left(self) -> object:
        """A backward is over, of which nothing is known yet: what has to be known of this moment later."""
        return None if self._guard is None else self._guard.note_scale()

    def step_follows(self, optimizer: Optimizer) -> None:
        """A closure has run, and the step changes the weights next."""
        if self._guard is not None:
            self._guard.before_step(optimizer)

    def ended(
        self, calls: list[BackwardCall], arrivals: list[Arrival], batches: NonFiniteBatches, left: object
    ) -> None:
        """Defer the failure of a backward whose frames are not yet kept, unless its batch is among `batches`."""
        calls = [BackwardCall(*call) for call in calls]
        fault = find_in_backward(calls, [Arrival(*one) for one in arrivals], rank=self._rank())
        # The gradients of a non-finite forward are its consequence.
        if fault is None or self._guard is None or fault.finding.batch in batches:
            return
        batch = fault.finding.batch
        # The frames of a backward are kept, and counted, once it has been told of.
        num_before, place = self._recorder.frames_of_batch(batch), fault.finding.sequence
        sequence = None if num_before is None or place is None else num_before + place
        finding = replace(fault.finding, sequence=sequence)
        report = self._reports.latest(finding, batch, fault.frames)
        nonfinite = [(call.frame, row) for call in calls for row in call.frame.rows if is_fault(row)]
        self._failed(batch)
        self._guard.defer(report, {frame.batch for frame, _ in nonfinite}, self._weights(nonfinite), left)

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

    def _look_at_sums(self) -> None:
        """Defer what finite gradients have added up to in a weight, where that is not finite."""
        model, batch = self._model(), self._recorder.latest_batch
        nonfinite: list[tuple[FrameRows, Row]] = []
        for name, _, module in () if model is None else named_modules(model):
            for label, x in module._parameters.items():
                if x is not None and x.grad is not None:
                    row = observe(x.grad, f"{label}.grad", "gradient")
                    if is_fault(row):
                        kind = type(module).__name__
                        nonfinite.append((FrameRows(batch, name, kind, [row], False, "backward"), row))
        if not nonfinite or self._guard is None:
            return
        frame = nonfinite[0][0].to_frame()
        sequence = self._recorder.frames_of_batch(batch)
        finding = finding_of(frame, frame.records[0], "produced", None, self._rank(), sequence)
        remark = _REDUCED if frame.records[0].is_shard else _ADDED_UP
        report = self._reports.latest(replace(finding, remarks=(remark,)), batch, [nonfinite[0][0]])
        self._failed(batch)
        self._guard.defer(report, {batch}, self._weights(nonfinite))

    def _state_seen(self, rows: list[Row]) -> None:
        batch = self._recorder.latest_batch
        if self._recorder.paused or batch < 0 or batch % self._options.every:
            return
        self._recorder.add_frame(batch, self._node, rows)
        if not any(map(is_fault, rows)):
            return
        num_frames = self._recorder.frames_of_batch(batch)
        report = self._reports.latest(None, batch)
        finding = find(report.frames[-1:], rank=self._rank(), num_frames=num_frames)
        self._act(replace(report, finding=finding))


class OptimizerState:
    """Hands `tell` the rows of one optimizer's state after each of its steps, and before the first one that finds any.

    What `tell` raises, the step raises.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, tell: Callable[[list[Row]], None]) -> None:
        self._model = weakref.ref(model)
        self._tell = tell
        self._has_begun = False
        this, watched = weakref.ref(self), weakref.ref(optimizer)

        def before(stepping: Optimizer, *_: Any) -> None:
            if (state := this()) is not None and steps_for(stepping, watched()) and not state._has_begun:
                state._has_begun = True
                if stepping.state:  # as loaded
                    state._look(stepping)

        def after(stepping: Optimizer, *_: Any) -> None:
            if (state := this()) is not None and steps_for(stepping, watched()):
                state._look(stepping)

        self._hooks = Handles(self, [before_steps.add(before), after_steps.add(after)])

    def remove(self) -> None:
        """Look at no more steps."""
        self._hooks.remove()

    def _look(self, optimizer: Optimizer) -> None:
        model = self._model()
        names = {} if model is None else parameter_names(model)
        self._tell(state_rows(optimizer, names))


def state_rows(optimizer: Optimizer, names: dict[int, str]) -> list[Row]:
    """Return the rows of an optimizer's state: `exp_avg[0.weight]`, with the name of the parameter that it is of.

    `names` are those of the model's parameters, by id. A parameter that is not among them, such as a float32 copy of a
    weight, is called by its place, `[group][position]`, and has a row of its own: `param[0][3]`. Step counts are left
    out.
    """
    rows: list[Row] = []
    for number, group in enumerate(optimizer.param_groups):
        for position, x in enumerate(group["params"]):
            name = names.get(id(x))
            where = f"[{number}][{position}]" if name is None else f"[{name}]"
            if name is None:
                rows.append(observe(x, f"param{where}", "weight"))
            for key, value in optimizer.state.get(x, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.is_floating_point():
                    rows.append(observe(value, f"{key}{where}", "buffer"))
    return rows


def steps_for(stepping: Optimizer, given: Optimizer | None) -> bool:
    """Whether it is the given one, or the one inside a wrapper whose own step calls no hooks, as Accelerate's."""
    if stepping is given or given is None:
        return stepping is given
    return stepping.param_groups is given.param_groups and not getattr(type(given).step, "hooked", False)
