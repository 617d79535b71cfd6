"""Backwards and optimizer steps of a Watch: what happens between one forward and the next.

The failure of a backward is deferred until a step is about to take its gradients: with a GradScaler an inf in them is
no failure, as the step is skipped and the scale goes down. PyTorch gives no signal when GradScaler skips a step, so
this infers it afterwards: the optimizer says `found_inf` (fused ones), the scale has fallen, or the non-finite
gradients are gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import isfinite, isnan
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..diagnosis.incident import Incident
from ..diagnosis.loss_statements import backward_under_way
from ..history.spikes import SpikeWatch
from ..instrumentation import global_hooks
from ..instrumentation.global_hooks import Handles, find_scaler, weakly
from ..instrumentation.wrapped_names import parameter_names, parameter_owners
from ..numerics.readable import Numbers, is_plain
from ..recording.backward import find_in_backward
from ..recording.events import Arrival, BackwardCall, Event
from ..recording.observe import nonfinite, observe, observe_all, state_tensors
from ..records.record import Frame, Note
from ..report import text
from ..report.events import SkippedStep
from ..report.finding import LOSS, OPTIMIZER
from ..util.job import rank
from ..util.messages import suppressed, warn_user
from ..util.program import each_parameter, parameters_of
from .reports import Reports

# Skipped steps that are kept. All are counted.
_MAX_KEPT = 100
# Gradients of weights that are looked at before every step, and the most elements of one.
_NUM_FIRST, _SMALL = 4, 1 << 12


@dataclass(slots=True)
class _Deferred:
    """The failure of a backward, and the batches whose gradients were not finite.

    `scale` is the GradScaler's in the backward. `is_of_weight`: the gradient of a weight was among them. `weights` are
    the ids of those that had a bad one. `latest`: the latest batch at its end. `is_skipped`: the optimizer said so.
    """

    incident: Incident
    scale: float | None
    batches: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)
    is_of_weight: bool = False
    latest: int = -1
    is_skipped: bool = False


class OptimizerSteps:
    """Part of a Watch that looks at backwards and at the steps of every optimizer, until `remove`.

    Before a step it reads the learning rates and the gradients that the step takes, by default some of them, after it
    the state of the option `optimizer`, and after the last step of a run the weights. A failure that is due goes to
    `failures`, which may raise: the backward or the step then ends before a weight has changed. The same checks follow
    a step's closure, because the weights change next. `tell` gets each skipped step, `spikes` each backward and step.
    """

    def __init__(self, reports: Reports, failures: Any, tell: Callable[[SkippedStep], object]) -> None:
        self._reports, self._failures, self._tell = reports, failures, tell
        self._starts = reports.starts
        self._model, self._recorder, self._options = reports.model, reports.recorder, reports.options
        recorder, options = self._recorder, self._options
        self.spikes: SpikeWatch | None = None
        self.deferred: _Deferred | None = None  # the failure that waits for a step
        self.skipped: deque[SkippedStep] = deque(maxlen=_MAX_KEPT)
        self.num_skipped = self._in_a_row = 0
        self.num_untaken = 0  # non-finite backwards after which a step took finite gradients
        self._skipped_weights = set[int]()  # of the latest skipped step
        self._loss: Frame | None = None  # of a loss that is nan or inf, where a gradient is not finite either
        self._scaler: Callable[[], Any] = lambda: options.scaler  # else the one that was found
        self._num_scales = 0
        self._has_read_state = options.optimizer is None
        self._unread_step = -1  # batch before the latest step, unless the weights were read since
        self._backwards = recorder.subscribe(Event.BACKWARD_START)
        self._backwards.active = options.gradients is not False
        hooks = [global_hooks.before_steps.add(weakly(self._before_step))] if options.enabled else []
        if options.optimizer is not None:
            self._node = recorder.add_node(OPTIMIZER, options.optimizer, False, False)
        self._hooks = Handles(self, hooks)

    def remove(self) -> None:
        """Look at no more backwards and steps."""
        self._hooks.remove()
        if self._backwards.active:
            self._backwards.remove()
            self.settle()
            if (model := self._model()) is not None:
                self._recorder.forget_gradients(list(each_parameter(model)))

    # A backward

    def backward_started(self) -> None:
        """Look at the loss of a backward that begins: nan or inf is a failure, even if all gradients are finite."""
        self.settle()
        loss = None if self._recorder.paused else backward_under_way()
        is_readable = loss is not None and is_plain(loss) and loss.device.type in ("cpu", "cuda")
        numbers = Numbers(loss) if loss is not None and is_readable else None
        if self.spikes is not None:
            self.spikes.backward_started(numbers)
        if loss is None or numbers is None:
            return
        batch, self._loss = self._recorder.latest_batch, None

        # A loss in half precision may be inf by its scale alone, and a scaler then skips the step or not.
        is_bad: Any = isnan if loss.dtype is torch.float16 else lambda number: not isfinite(number)

        def ended() -> None:
            self._reports.losses.append(number := numbers.wait()[0])
            if is_bad(number):
                self._loss_is_bad(loss, batch, number)

        # On a GPU wait until the backward ends, where the host waits for the gradients anyway.
        if loss.device.type == "cuda" or is_bad(numbers.wait()[0]):
            torch.autograd.Variable._execution_engine.queue_callback(ended)
        else:
            ended()

    def backward_ended(self, calls: list[BackwardCall], arrivals: list[Arrival]) -> None:
        """Defer the failure of a backward whose frames are not kept yet."""
        calls = [BackwardCall(*call) for call in calls]
        arrivals = [Arrival(*arrival) for arrival in arrivals]
        fault = find_in_backward(calls, arrivals, rank=rank())
        # The gradients of a non-finite forward are its consequence.
        if fault is None or self._failures.knows(fault[0].batch):
            return
        finding, frames = fault
        batch = finding.batch
        # The recorder keeps and counts the frames of a backward after this call.
        num_before, place = self._recorder.frames_of_batch(batch), finding.sequence
        sequence = None if num_before is None or place is None else num_before + place
        report = self._reports.latest(replace(finding, sequence=sequence), frames)
        bad = [x for x in arrivals if calls[x.call].frame.records[x.record].is_fault]
        batches = {calls[x.call].frame.batch for x in bad}
        self._defer(Incident(report), batches, is_of_weight=any(x.part == "weight" for x in bad))

    def _loss_is_bad(self, loss: Tensor, batch: int, number: float) -> None:
        """Act on a nan loss with all gradients read and finite. Leave others to the step, which may be left out."""
        if self._failures.knows(batch):
            return
        if self.deferred is None:
            self._starts.backward_failed(batch)
        name = type(loss).__name__ if loss.grad_fn is None else loss.grad_fn.name()
        frame = Frame(batch, LOSS, name, (observe(loss.detach(), "output", "output"),), "backward")
        if self.deferred is not None or not isnan(number) or not self._options.gradients:
            self._loss = frame
        else:
            self._failures.step_follows(self._reports.of_frame(frame))

    # Deferred until a step

    def _defer(
        self, incident: Incident, batches: set[int], *, is_of_weight: bool, is_over: bool = False
    ) -> None:
        """Defer a failure, or act on it at once if too many steps in a row were skipped."""
        if (deferred := self.deferred) is None:
            deferred = _Deferred(incident, scale_of(self._find_scaler()))
            self._starts.backward_failed(incident.finding.batch, is_over=is_over)
        # A new set: another thread may iterate over the old one.
        deferred.batches = deferred.batches | batches
        deferred.weights |= self._bad_weights()
        deferred.is_of_weight |= is_of_weight or bool(deferred.weights)
        deferred.latest = self._recorder.latest_batch
        if deferred.incident is incident:
            self.deferred = deferred
        count, most = self._in_a_row, self._options.max_skipped_steps
        if count >= most and (due := self.release()) is not None:  # otherwise another thread's step was first
            self._in_a_row = 0
            skipped = f"the {count} steps before this one were skipped, as gradients were not finite"
            due.remark(f"{skipped}; {most} in a row are the most")
            self._failures.step_follows(due)

    def release(self) -> Incident | None:
        """Return the incident of a backward that waits for a step, and drop it."""
        deferred, self.deferred = self.deferred, None
        return None if deferred is None else deferred.incident

    def settle(self, *, only_known: bool = False) -> None:
        """Find out whether the deferred backward's step was skipped. `only_known`: gone gradients do not count."""
        if (deferred := self.deferred) is None:
            return
        before, after = deferred.scale, scale_of(self._find_scaler())
        is_known = deferred.is_skipped or (before is not None and after is not None and after < before)
        if not is_known and (only_known or not deferred.is_of_weight or self._bad_weights()):
            return
        if not is_known and self._options.scaler is None:
            before = None  # the scale has not fallen, so the scaler that was found did not skip the step
        finding = deferred.incident.finding
        self.deferred, self._skipped_weights = None, deferred.weights
        step = SkippedStep(finding.batch, before, after, finding)
        self.skipped.append(step)
        self.num_skipped += 1
        self._in_a_row += 1
        self._recorder.excuse_gradients(sorted(deferred.batches), step.note)
        self._tell(step)

    def _bad_weights(self) -> set[int]:  # by id
        model = self._model()
        return set() if model is None else {id(x) for x in _nonfinite_gradients(each_parameter(model))}

    # The GradScaler

    def find_scale(self) -> Tensor | None:
        """Return the present scale on its own device; None where no scaler is found."""
        self._num_scales += 1
        # Look before anything is non-finite, because later the scale is another; ever less often in vain.
        scale = getattr(self._find_scaler(may_search=self._num_scales.bit_count() == 1), "_scale", None)
        return scale if isinstance(scale, Tensor) else None

    def _find_scaler(self, *, may_search: bool = True) -> Any:
        if may_search and self._scaler() is None:
            self._scaler = find_scaler()
        return self._scaler()

    # A step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, is_on = self._recorder, not self._recorder.paused
        takes_ours = is_on and self._takes_gradients(optimizer)
        self._unread_step = recorder.latest_batch if is_on else self._unread_step
        # Most steps end here: no failure is due, no closure follows, and the compiled part sees nothing bad.
        is_quiet = self.deferred is None and self._loss is None and not self._in_a_row
        is_usual = is_quiet and self._has_read_state and self._options.gradients is None
        may_end = is_usual and takes_ours and not self._starts.has_kept and len(args) == 1 and not kwargs
        if recorder.step_begins(optimizer.param_groups if may_end else None):
            return None
        if takes_ours:
            self._check_rates(optimizer)
        if not self._has_read_state and optimizer.state:  # from a checkpoint
            self._read_state(optimizer)
        if self._options.gradients is False:
            return None
        check = partial(self._check_gradients, optimizer, takes_ours)
        check()
        return global_hooks.with_check_after_closure(optimizer, args, kwargs, check)

    def _takes_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer holds a parameter of the model. A critic's, say, does not."""
        steppers, number = self._reports.steppers, id(optimizer)
        reference, known_count, takes = steppers.get(number, (None, -1, False))
        if takes:
            return True
        # One search for each optimizer, unless it gets a group: 0.5 ms for the parameters of 400 modules.
        if (count := sum(len(group["params"]) for group in optimizer.param_groups)) != known_count:
            takes = bool(self._recorder.gathers_weights) or self._steps_given(optimizer)
            if not takes and (model := self._model()) is not None:
                takes = not {*map(id, parameters_of(optimizer))}.isdisjoint(map(id, each_parameter(model)))
            reference = reference or weakref.ref(optimizer, lambda _: steppers.pop(number, None))
            steppers[number] = reference, count, takes
        return takes

    def _steps_given(self, stepping: Optimizer) -> bool:
        """Return whether `stepping` is the optimizer in the options, or in it: Accelerate's calls no hooks."""
        given = self._options.optimizer
        return given is not None and stepping.param_groups is given.param_groups

    def _check_rates(self, optimizer: Optimizer) -> None:
        """Stop a step whose learning rate is nan or inf, as every weight would be. Waits for no device."""
        for number, group in enumerate(optimizer.param_groups):
            rate: Any = group.get("lr")
            is_bad = isinstance(rate, float) and not isfinite(rate)
            if isinstance(rate, Tensor) and rate.device.type == "cpu":  # may require a gradient
                is_bad = bool(nonfinite([rate]))
            if is_bad and (batch := self._recorder.latest_batch) >= 0 and not self._failures.knows(batch):
                record = observe(torch.as_tensor(rate), f"lr[{number}]", "input")
                frame = Frame(batch, OPTIMIZER, type(optimizer).__name__, (record,), "step")
                self._failures.step_follows(self._reports.of_frame(frame))
                return

    def _check_gradients(self, optimizer: Optimizer, takes_ours: bool) -> None:
        """Stop a step that is about to change the weights with a non-finite gradient."""
        recorder = self._recorder
        recorder.settle()
        if recorder.paused:
            return
        batch = max(recorder.latest_batch, 0)  # of a model of which methods alone are called
        if torch._C._current_graph_task_id() != -1:
            # This optimizer steps inside the backward, as soon as a gradient is there.
            recorder.finish_nonfinite_backward()
        if not self._options.gradients:
            # A finite backward goes unseen, so a later batch takes its place.
            if self._loss is not None and self._loss.batch != batch:
                self._loss = None  # its own step was left out
            if self.deferred is not None:
                self.settle(only_known=self.deferred.latest == batch)
            is_quiet = self.deferred is None and self._loss is None and not self._in_a_row
            # A nan on its way through the model leaves the first gradients nan.
            small = (x for x in parameters_of(optimizer) if x.grad is not None and x.grad.numel() <= _SMALL)
            if is_quiet and not (takes_ours and _nonfinite_gradients(islice(small, _NUM_FIRST))):
                if takes_ours:
                    self._starts.let_go()
                return
        # Read what the step takes, whoever wrote it since the backward: sums of several backwards, reductions over
        # ranks, and gradients that no hook sees, such as those of weights used without their module.
        bad_parameters = list[Tensor]()
        if self.deferred is not None or (takes_ours and self._is_due(batch)):
            bad_parameters = _nonfinite_gradients(parameters_of(optimizer))
        # The gradients of a non-finite forward are its consequence.
        if bad_parameters and self.deferred is None and not self._failures.knows(batch):
            incident = self._reports.of_taken(optimizer, bad_parameters, batch)
            self._defer(incident, {batch}, is_of_weight=True, is_over=True)
        loss, self._loss = (self._loss, None) if takes_ours else (None, self._loss)
        found_inf = getattr(optimizer, "found_inf", None)
        if (deferred := self.deferred) is None:
            if loss is not None and not bad_parameters:
                self._failures.step_follows(self._reports.of_frame(loss))
            # The steps of another optimizer, as of a GAN's other part, end no run.
            weights = self._skipped_weights
            if self._in_a_row and (weights & {*map(id, parameters_of(optimizer))} if weights else takes_ours):
                self._in_a_row = 0
        elif isinstance(found_inf, Tensor) and bool(found_inf.detach().any()):
            deferred.is_skipped, scale = True, getattr(optimizer, "grad_scale", None)
            if deferred.scale is None and isinstance(scale, Tensor):
                deferred.scale = float(scale)
        elif bad_parameters or (loss is not None and not deferred.weights):
            if (due := self.release()) is not None:  # otherwise another thread's step was first
                self._failures.step_follows(due)
                return
        # The gradients of weights may be finite behind a bad one, as where a ReLU lets nothing through.
        elif not deferred.is_of_weight or not self._bad_weights():
            self._let_pass(deferred)
        # Each rank has a part of the model. By default a rank comes here alone.
        if takes_ours and recorder.gathers_weights and self._options.gradients:
            self._failures.ranks.await_step()
        if self.deferred is None:
            if self.spikes is not None:
                self.spikes.before_step(optimizer)
            if takes_ours:
                self._starts.let_go()

    def _let_pass(self, mended: _Deferred) -> None:
        """Drop a failure whose gradients the user has made finite. Warn of the 1st, 2nd, 4th, 8th: 100 give 7 lines."""
        self.deferred = None
        self._recorder.excuse_gradients(sorted(mended.batches), Note("not_taken"))
        self.num_untaken = count = self.num_untaken + 1
        if count.bit_count() == 1:
            so_far = f" ({count:,} such backwards so far)" if count > 1 else ""
            verdict = "the gradients that the optimizer's step takes are finite: nothing was stopped"
            warn_user(f"{text.summary(mended.incident.finding)}; {verdict}{so_far}")

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Look at what a step has written, and count it. A failure ends the step, so other hooks come before this."""
        if self._options.optimizer is not None:
            self._read_state(optimizer)
        # Fused optimizers write without the version counter. The step itself is the only sign.
        if self._recorder.stepped([group["params"] for group in optimizer.param_groups]):
            self.act()
        self._reports.num_steps += not self._recorder.paused and self._takes_gradients(optimizer)

    def _read_state(self, optimizer: Optimizer) -> None:
        batch = self._recorder.latest_batch
        if self._recorder.paused or not self._is_due(batch) or not self._steps_given(optimizer):
            return
        model = self._model()
        names = {} if model is None else parameter_names(model)
        self._has_read_state = True
        # A state without a dimension is a count of steps.
        tensors = state_tensors(optimizer, names)
        values = [x for x in tensors if x[0] == "weight" or (x[2].ndim and x[2].is_floating_point())]
        records = observe_all(values, self._options.recorder_settings())
        frame = Frame(batch, OPTIMIZER, type(optimizer).__name__, tuple(records), "step")
        incident = None if frame.fault is None else self._reports.of_frame(frame)
        self._recorder.add_frame(batch, self._node, records)
        if incident is None:
            self.act()
        else:
            self._failures.step_follows(incident)

    def _is_due(self, batch: int) -> bool:
        return batch % self._options.every == 0

    # The last step

    def look(self) -> Incident | None:
        """Return the failure of steps since the latest forward that have left a weight non-finite, if there is one."""
        batch, model, options = self._recorder.latest_batch, self._model(), self._options
        is_known = batch < self._failures.latest + options.every  # by the failure that it follows
        is_left_out = self._recorder.paused or is_known or "weights" not in options.read
        if batch < 0 or model is None or self._unread_step != batch or is_left_out:
            return None
        owners = parameter_owners(model)
        trained = (x for x in each_parameter(model) if x.requires_grad)
        for x in nonfinite(x for x in trained if options.observes(owners[id(x)][0].name)):
            (name, _, module), label = owners[id(x)]
            record = observe(x, label, "weight", self._reports.excuses(name, module))
            if record.is_fault:
                frame = Frame(batch, name, type(module).__name__, (record,), "step")
                return self._reports.of_frame(frame)
        return None

    def act(self) -> None:
        """Act on the failure of `look`, once."""
        incident, self._unread_step = self.look(), -1
        if incident is not None:
            self._failures.step_follows(incident)


def _nonfinite_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradients are not finite, in their order."""
    parameters = list(parameters)
    gradients = {id(x) for x in nonfinite(x.grad for x in parameters if x.grad is not None)}
    return [x for x in parameters if id(x.grad) in gradients]


def scale_of(scaler: Any) -> float | None:
    """Return the present loss scale of a GradScaler, if there is one; None too for 0, inf and nan."""
    try:
        scale = 0.0 if scaler is None else float(scaler.get_scale())
    except Exception:
        suppressed("a GradScaler of another make did not tell its scale")
        return None
    return scale if scale and isfinite(scale) else None
