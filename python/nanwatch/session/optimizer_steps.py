"""Backwards and optimizer steps of a Watch: what happens between one forward and the next.

OptimizerSteps finds the first non-finite gradient of a backward and defers the failure. Before a step it reads the
gradients that the step takes and stops non-finite ones, after it it reads the optimizer's state, and after the last
step of a run the weights.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer

from ..blackbox.process import process_box
from ..diagnosis.incident import Incident
from ..diagnosis.loss_statements import loss_under_way
from ..diagnosis.optimizer_step import take_apart
from ..instrumentation.global_hooks import Handles, after_steps, before_steps, with_check_after_closure
from ..instrumentation.wrapped_names import find_module, named_modules, parameter_names, parameter_owners
from ..numerics.readable import Numbers, is_plain
from ..recording.backward import find_in_backward
from ..recording.events import Arrival, BackwardCall, Event
from ..recording.observe import nonfinite, observe, read, state_tensors
from ..records.record import Frame, Role
from ..report.finding import Finding, find
from ..util.job import rank
from ..util.modules import WeakIdentityDict, each_parameter
from .optimizer_guard import OptimizerGuard, Weight
from .reports import Reports

if TYPE_CHECKING:
    from ..history.spikes import SpikeWatch
    from .failure_handler import FailureHandler

# Name of the frames of an optimizer's state.
_OPTIMIZER = "(optimizer)"


class OptimizerSteps:
    """Part of a Watch that looks at backwards and at the steps of every optimizer.

    With `guard`, the failure of a backward is deferred until a step is about to take it. A failure that is due goes to
    `failures`. The backward or the step raises what that raises, and no weight has changed. A step's closure is
    followed by the same checks, because the weights change next, and its backward may have ended on another thread.
    """

    def __init__(
        self,
        reports: Reports,
        failures: FailureHandler,
        guard: OptimizerGuard | None,
        spikes: SpikeWatch | None,
    ) -> None:
        self._reports = reports
        self._model = reports.model
        self._recorder = recorder = reports.recorder
        self._options = options = reports.options
        self._failures = failures
        self._guard = guard
        self._spikes = spikes
        self._starts = None if guard is None else recorder.subscribe(Event.BACKWARD_START)
        # A loss that is nan, and its batch, where a gradient is not finite either.
        self._loss: tuple[Tensor, int] | None = None
        self._given = None if options.optimizer is None else weakref.ref(options.optimizer)
        # One search for each optimizer, unless it gets a group: 0.5 ms for the parameters of 400 modules.
        self._takes: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._has_read_state = options.optimizer is None
        # The optimizers, and the latest batch before the latest step of each.
        self._stepped: WeakIdentityDict[int] = WeakIdentityDict()
        self._last_step: Incident | None = None
        reports.explain_weight = self._explain_weight
        steps = weakref.ref(self)

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (live := steps()) is None:
                return None
            begin = live._before_compiled_step if is_compiling() else live._before_step
            return begin(optimizer, args, kwargs)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (live := steps()) is not None and live._steps_given(optimizer):
                live._read_state(optimizer)

        hooks = [before_steps.add(before)]
        if options.optimizer is not None:
            self._node = recorder.add_node(_OPTIMIZER, options.optimizer, False, False)
            hooks.append(after_steps.add(after))
        self._hooks = Handles(self, hooks)

    def remove(self) -> None:
        """Look at no more backwards and steps."""
        self._hooks.remove()
        if self._starts is not None:
            self._starts.remove()
            self.settle()
            if (model := self._model()) is not None:
                self._recorder.forget_gradients(list(each_parameter(model)))

    def settle(self) -> None:
        """Make frames of backwards that ended by an exception, and find out whether the deferred step was skipped."""
        self._recorder.settle()
        if self._guard is not None:
            self._guard.settle()

    # A backward

    def backward_started(self) -> None:
        """Look at the loss of a backward that begins: one that is nan is a failure, though its gradients be finite."""
        if self._guard is None:
            return
        self._guard.settle()
        if self._spikes is not None:
            self._spikes.backward_started()
        loss = None if self._recorder.paused else loss_under_way()
        if loss is None or not is_plain(loss) or not loss.is_floating_point():
            return
        batch, self._loss = self._recorder.latest_batch, None
        at_end = torch.autograd.Variable._execution_engine.queue_callback
        if loss.device.type == "cuda":  # at its end the host waits for the gradients anyway
            at_end(partial(self._loss_came, loss, Numbers(loss), batch))
        elif loss.device.type == "cpu" and isnan(read(loss, "output", "output").abs_max or 0.0):
            at_end(partial(self._loss_is_nan, loss, batch))

    def backward_ended(self, calls: list[BackwardCall], arrivals: list[Arrival]) -> None:
        """Defer the failure of a backward whose frames are not kept yet."""
        calls = [BackwardCall(*call) for call in calls]
        fault = find_in_backward(calls, [Arrival(*arrival) for arrival in arrivals], rank=rank())
        # The gradients of a non-finite forward are its consequence.
        if fault is None or self._failures.knows(fault[0].batch):
            return
        finding, frames = fault
        batch = finding.batch
        # The recorder keeps and counts the frames of a backward after this call.
        num_before, place = self._recorder.frames_of_batch(batch), finding.sequence
        sequence = None if num_before is None or place is None else num_before + place
        self._failures.rerun.keep_loss(batch)
        report = self._reports.latest(replace(finding, sequence=sequence), batch, frames)
        faults = [(call.frame, record) for call in calls for record in call.frame.records if record.is_fault]
        model, weights = self._model(), set[Weight]()
        modules = {} if model is None else {named.name: named.module for named in named_modules(model)}
        for frame, record in faults:
            name, module = record.label.removesuffix(".grad"), modules.get(frame.name)
            if module is not None and name in module._parameters:
                weights.add((weakref.ref(module), name))
        self._defer(Incident(report), {frame.batch for frame, _ in faults}, weights)

    def _loss_came(self, loss: Tensor, numbers: Numbers, batch: int) -> None:
        if any(map(isnan, numbers.wait())):
            self._loss_is_nan(loss, batch)

    def _loss_is_nan(self, loss: Tensor, batch: int) -> None:
        """Act on a loss that is nan. If a gradient is not finite either, leave it to the step, which may be skipped."""
        if self._failures.knows(batch):
            return
        if self._guard is not None and self._guard.pending is not None:
            self._loss = loss.detach(), batch
            return
        name = type(loss).__name__ if loss.grad_fn is None else loss.grad_fn.name()
        frame = Frame(batch, "(loss)", name, (observe(loss.detach(), "output", "output"),), "backward")
        incident = self._reports.of_frame(frame, "received")
        self._failures.rerun.keep_loss(batch)
        self._failures.rerun.backward_failed(batch)
        self._failures.step_follows(incident)

    def _defer(self, incident: Incident, batches: set[int], weights: set[Weight]) -> None:
        self._failures.rerun.backward_failed(incident.finding.batch)
        due = None if self._guard is None else self._guard.defer(incident, batches, weights)
        if due is not None:
            self._failures.step_follows(due)

    # A step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (box := process_box()) is not None:
            box.step_begins()
        changed = None
        if not self._recorder.paused:
            self._stepped[optimizer] = self._recorder.latest_batch
        if (guard := self._guard) is not None:
            check = partial(self._check_gradients, optimizer, guard, self._takes_gradients(optimizer))
            changed = with_check_after_closure(optimizer, args, kwargs, check)
            check()
        if not self._has_read_state and self._steps_given(optimizer):
            self._has_read_state = True
            if optimizer.state:  # from a checkpoint
                self._read_state(optimizer)
        return changed

    # Otherwise torch.compile compiles this with the step, function by function.
    _before_compiled_step = _disable_dynamo(_before_step)

    def _takes_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer holds a parameter of the model."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._takes.get(optimizer)
        if known is not None and (known[1] or known[0] == count):
            return known[1]
        model = self._model()
        taken = {id(x) for group in optimizer.param_groups for x in group["params"]}
        takes = (
            self._recorder.gathers_weights
            or self._steps_given(optimizer)
            or (model is not None and any(id(x) in taken for x in each_parameter(model)))
        )
        self._takes[optimizer] = count, takes
        return takes

    def _steps_given(self, stepping: Optimizer) -> bool:
        """Return whether `stepping` is the optimizer in the options, or is inside it.

        The step of a wrapper, such as Accelerate's, calls no hooks itself.
        """
        given = None if self._given is None else self._given()
        return given is not None and stepping.param_groups is given.param_groups

    def _check_gradients(self, optimizer: Optimizer, guard: OptimizerGuard, takes_ours: bool) -> None:
        """Stop a step that is about to change the weights with a non-finite gradient.

        takes_ours: the step takes gradients of the model, as the step of a critic between forward and loss does not.
        """
        recorder = self._recorder
        recorder.settle()
        if recorder.paused:
            return
        if torch._C._current_graph_task_id() != -1:
            # This optimizer steps inside the backward, as soon as a gradient is there.
            recorder.finish_nonfinite_backward()
        # Read what the step takes, whoever wrote it since the backward: sums of several backwards, reductions over
        # ranks, and gradients that no hook sees, such as those of weights used without their module.
        batch, bad_parameters = recorder.latest_batch, list[Tensor]()
        is_due = batch >= 0 and batch % self._reports.options.every == 0
        if guard.pending is not None or (takes_ours and is_due):
            bad_parameters = _nonfinite_parameters(optimizer)
        # The gradients of a non-finite forward are its consequence.
        if bad_parameters and guard.pending is None and not self._failures.knows(batch):
            incident, weights = self._of_taken(optimizer, bad_parameters, batch)
            self._defer(incident, {batch}, weights)
        loss, self._loss = self._loss, None
        is_nan = loss is not None and not bad_parameters
        if loss is not None and is_nan and guard.pending is None:
            self._loss_is_nan(*loss)
        # The gradients of weights may be finite behind a bad one, as where a ReLU lets nothing through.
        due = guard.check_step(optimizer, is_nonfinite=bool(bad_parameters) or is_nan)
        if due is not None:
            self._failures.step_follows(due)
        elif takes_ours:
            self._failures.await_ranks()
        if due is None and guard.pending is None:
            if self._spikes is not None:
                self._spikes.before_step(optimizer)
            if takes_ours:
                self._failures.rerun.let_go()

    def _of_taken(
        self, optimizer: Optimizer, parameters: list[Tensor], batch: int
    ) -> tuple[Incident, set[Weight]]:
        """Return the failure of these parameters, whose gradients were finite or unseen in the backward."""
        model, is_never_called = self._model(), self._reports.is_never_called
        owners = {} if model is None else parameter_owners(model)
        owned = [x for x in parameters if id(x) in owners]
        called = [x for x in owned if not is_never_called(owners[id(x)][0].name)]
        parameter = (called or owned or parameters)[0]
        if model is not None and owned:
            owner, label = owners[id(parameter)]
            name = owner.name
            while name and is_never_called(
                name
            ):  # the nearest module around it that is called has the weight
                name, _, inner = name.rpartition(".")
                label = f"{inner}.{label}"
            class_name = type((find_module(model, name) or owner).module).__name__
        else:  # it is beside the model
            name, class_name = _OPTIMIZER, type(optimizer).__name__
            label = next(state.label for state in state_tensors(optimizer, {}) if state.tensor is parameter)
        record = observe(parameter.grad, f"{label}.grad", "gradient")
        is_unseen = bool(owned) and not called  # no hook has seen the gradient that the backward made
        frame = Frame(batch, name, class_name, (record,), "backward" if is_unseen else "step")
        incident = self._reports.of_frame(frame, "produced" if is_unseen else "received")
        return incident, {(weakref.ref(owners[id(x)][0].module), owners[id(x)][1]) for x in owned}

    def _read_state(self, optimizer: Optimizer) -> None:
        batch = self._recorder.latest_batch
        if self._recorder.paused or batch < 0 or batch % self._options.every:
            return
        model = self._model()
        names = {} if model is None else parameter_names(model)
        settings, records = self._options.recorder_settings(), []
        for state in state_tensors(optimizer, names):
            if state.is_parameter or (
                state.tensor.ndim and state.tensor.is_floating_point()
            ):  # no count of steps
                role: Role = "weight" if state.is_parameter else "buffer"
                records.append(observe(state.tensor, state.label, role, wanted=settings))
        self._recorder.add_frame(batch, self._node, records)
        if not any(record.is_fault for record in records):
            self.act()
            return
        report = self._reports.latest(None, batch)
        finding = find(report.frames[-1:], rank=rank(), num_frames=self._recorder.frames_of_batch(batch))
        self._failures.step_follows(Incident(replace(report, finding=finding)))

    # The last step

    def look(self) -> Incident | None:
        """Return the failure of steps since the latest forward that have left a weight non-finite, if there is one."""
        batch, model = self._recorder.latest_batch, self._model()
        last = [optimizer for optimizer in self._stepped.objects() if self._stepped.get(optimizer) == batch]
        if batch < 0 or model is None or not last or self._recorder.paused or self._failures.is_run_open:
            return self._last_step
        for optimizer in last:
            self._stepped[optimizer] = -1
        owners = {
            key: owner
            for key, owner in parameter_owners(model).items()
            if "weights" in self._options.read and self._options.observes(owner[0].name)
        }
        for x in nonfinite(x for x in each_parameter(model) if id(x) in owners):
            (name, _, module), label = owners[id(x)]
            record = observe(x, label, "weight", self._options.excuses(name, module))
            if record.is_fault:
                frame = Frame(batch, name, type(module).__name__, (record,), "step")
                self._last_step = self._reports.of_frame(frame, "weight")
                self._last_step.finding = self._explain_weight(self._last_step.finding)
                break
        return self._last_step

    def act(self) -> None:
        """Act on the failure of `look`, once."""
        incident, self._last_step = self.look(), None
        if incident is not None:
            self._failures.step_follows(incident)

    def _explain_weight(self, finding: Finding) -> Finding:
        """Return the finding of a weight with the operation of the step that wrote it, if an optimizer did."""
        model = self._model()
        path, _, key = f"{finding.module}.{finding.label}".removeprefix(".").rpartition(".")
        owner = None if model is None else find_module(model, path)
        weight = None if owner is None else owner.module._parameters.get(key)
        for optimizer in self._stepped.objects():
            if weight is not None and any(
                weight is x for group in optimizer.param_groups for x in group["params"]
            ):
                return take_apart(finding, optimizer, weight)
        return finding


def _nonfinite_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters whose gradients are not finite, in the order of the optimizer's groups."""
    parameters = [x for group in optimizer.param_groups for x in group["params"] if x.grad is not None]
    gradients = {id(gradient) for gradient in nonfinite(x.grad for x in parameters)}
    return [x for x in parameters if id(x.grad) in gradients]
