"""The re-run of a failed batch: find the operation, try cures, find the samples at fault, write it all down.

Each step may be missing a package, run out of memory or meet a model that cannot be run twice: then a remark says so,
and the report is what it was before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.functions import find_called
from ..instrumentation.global_hooks import steps_under_way
from ..instrumentation.wrapped_names import module_names
from ..precision.precision import NARROW
from ..records.record import Phase
from ..report.finding import with_earlier, working_first
from ..util.messages import spell
from . import isolation
from .batch_snapshot import BatchSnapshot, no_second_run
from .causes import StepAgain, is_taken_apart
from .cures import try_formats, try_patches, try_training
from .data import bad_tensors, batch_size, describe, find_in_dataset, find_samples
from .experiment import Allows, Trials, nothing_allowed
from .incident import Incident, attempt, write_failure
from .loss_statements import LossStatements, ProgramCall, around_gradients, place_of_step, with_loss
from .patching.source import find_target
from .patching.table import operation_name
from .provenance import ProvenanceMode, Step
from .search import Diagnosis, find_operation, of_forward

_ADVICE = "put the loss into a function below `@nanwatch.watched`: a report then has its line and operands"
_NOT_KEPT = (
    "the start of the batch was not kept. Run it alone, uncompiled, with one call of the model, for that"
)
_OTHER_DRAWS = "the re-run drew other random numbers before the call, from the state of the call"
# What overflows in a product of float32 is too large itself.
_PRODUCTS = ("mm", "addmm", "bmm", "convolution")
# Weights that have grown by more are those of a divergence.
_MOST_GROWTH = 100.0
# Callers of the model's call whose statements may have made its arguments.
_MOST_CALLERS = 4


def examine(
    incident: Incident,
    snapshot: BatchSnapshot | None,
    model: nn.Module,
    output_dir: Path | None,
    *,
    examines: bool,
    reason: str = "",
    call: ProgramCall | None = None,
    allows: Allows = nothing_allowed,
    loss_scale: float | None = None,
) -> None:
    """Complete the incident by a re-run, if it `examines`, and write it to `output_dir`, if any.

    `snapshot` is None where the batch cannot be run again; a `reason` says in words why it must not be. `call` is the
    program's, of the backward that failed. `loss_scale` is None where it is not known.
    `allows` tells which infinities are meant.
    """
    rerun = _Rerun(incident, model, allows, loss_scale)
    attempt("the search for the line of the step", rerun.find_step, incident.remark)
    try:
        if examines and (reason or (snapshot is None and call is None)):
            incident.remark(f"no re-run was made: {reason or _NOT_KEPT}")
        elif examines and incident.finding.phase == "backward":
            rerun.examine_backward(snapshot, call)
        elif examines and snapshot is not None:
            rerun.examine_batch(snapshot)
    except isolation.RerunEndedError as ended:
        incident.remark(f"the re-run of the batch ended: {ended}")
    if output_dir is not None:
        rerun.send()
        write_failure(incident, rerun.call, output_dir)


# What made a value before the call, as the start of a run that does so again, and what that run shows.
Maker: TypeAlias = tuple[BatchSnapshot, "Diagnosis"]


class _Rerun:
    """The re-run of one incident's batch, which completes the incident. `call` is that in which a forward failed."""

    call: BatchSnapshot | None = None

    def __init__(self, incident: Incident, model: nn.Module, allows: Allows, scale: float | None) -> None:
        self._incident, self._model = incident, model
        self._find = partial(find_operation, model=model, allows=allows)
        self._find_in = partial(of_forward, model=model, allows=allows)
        self._trials = partial(Trials, model=model, allows=allows, loss_scale=scale)

    def send(self) -> None:
        """Send what is known to the process of the program, should a later step not end."""
        isolation.send(self._incident.report.to_json())

    def find_step(self) -> None:
        """Find the line of the step that wrote a bad weight, or that was given a bad learning rate."""
        finding, called = self._incident.finding, None
        if finding.origin == "weight" and finding.operation is not None:
            called = find_called(self._model, finding.module)
        weights = {} if called is None else dict(called.module.named_parameters())
        weight, is_rate = weights.get(finding.label), finding.phase == "step" and finding.label[:3] == "lr["
        if (weight is not None or is_rate) and (place := place_of_step(weight)) is not None:
            operation = finding.operation or f"the step of {finding.class_name}"
            self._incident.learn(place=place, operation=operation)
        if finding.phase == "step" and finding.label.endswith(".grad"):
            self._incident.remark(*around_gradients())
        if weight is not None and finding.phase == "step" and isolation.is_child():
            for optimizer in steps_under_way()[-1:]:
                self._step_again(optimizer)

    def _step_again(self, optimizer: Optimizer) -> None:
        """Take the step again, to find the operation that makes a non-finite value, and cures."""
        finding = self._incident.finding
        has_bad_gradient = any(x.role == "gradient" and not x.isfinite for x in finding.operands)
        if has_bad_gradient or is_taken_apart(optimizer):
            return
        again = StepAgain(optimizer)
        with torch.no_grad(), ProvenanceMode(_Rerun._step_again.__code__) as provenance:
            again(again.values)
        steps = [x for x in provenance.steps if x.origin is None and not x.meant]
        for step in steps[:1]:
            place = finding.place if step.place is None else step.place.at
            operands = *step.operands, *finding.operands
            facts: dict[str, Any] = {"operands": operands, "made": step.made, "place": place}
            self._incident.learn(operation=f"{step.operation} in {finding.operation}", **facts)
            self._incident.remark(*step.remarks)
            # Where a narrow state has rounded, what helps is a wider one.
            if not any(x.dtype in NARROW for x in again.values):
                self._cure(BatchSnapshot(again, (again.values,), grad=False), step, "forward", False)

    def examine_batch(self, snapshot: BatchSnapshot) -> None:
        """Run the forward of the batch again to find the operation, cures and samples."""
        incident, was_there = self._incident, self._incident.finding.origin in ("data", "buffer")
        what = "the search for a statement before the call"
        maker = attempt(what, partial(self._find_maker, snapshot), incident.remark)
        start, diagnosis = maker or (snapshot, self._find(snapshot, incident.finding))
        incident.finding, step, self.call, holder = diagnosis
        self.send()
        if holder is not None:
            frames = with_earlier(incident.report.frames, holder)
            incident.report = replace(incident.report, frames=tuple(frames))
        may_cure = incident.finding.transient is False or (was_there and step is not None)
        if may_cure and (doubts := snapshot.doubts()):
            incident.remark(f"no cure was tried, as {doubts[0]}")
        elif may_cure:
            start = start if maker else with_loss(snapshot, self._model) or snapshot
            self._cure(start, step, "forward", maker is None)
        if maker and isinstance(start.module, LossStatements):
            incident.remark(f"found by running {start.module.where} again")
        if step is not None or incident.finding.origin == "data":
            self._find_samples(snapshot, batch_size(snapshot))

    def _find_maker(self, snapshot: BatchSnapshot) -> Maker | None:
        """Find the statement of the program that made a bad argument of the batch before the call, or its sample."""
        finding, module = self._incident.finding, snapshot.module
        is_given = finding.origin in ("data", "received") and finding.label in snapshot.tensors()
        if not is_given or module_names(self._model).get(module) != finding.module or no_second_run(module):
            return None
        x = snapshot.tensors()[finding.label]
        extent, is_data = describe(x), finding.origin == "data" or not x.requires_grad
        finding = replace(finding, origin="received", source_module=None)
        for depth in range(_MOST_CALLERS):
            if (start := with_loss(snapshot, self._model, depth)) is not None:
                diagnosis = self._find_in(start, finding, module)
                is_same = diagnosis.finding.extent == extent
                if diagnosis.step and diagnosis.step.is_maker and (is_same or start.draws):
                    # The random state of before the call is not known.
                    remarks = diagnosis.finding.remarks + (() if is_same else (_OTHER_DRAWS,))
                    made = replace(diagnosis.finding, index=finding.index, extent=extent, remarks=remarks)
                    return start, diagnosis._replace(finding=made, call=None)
        return self._find_sample(x, snapshot.seconds) if is_data else None

    def _find_sample(self, x: Tensor, seconds: float) -> Maker | None:
        """Find what made the bad values of the data in a dataset, whose sample is read again in a child process."""
        incident = self._incident
        try:
            with isolation.limited(seconds):
                samples = find_in_dataset(x) if isolation.is_child() else ""
                place, text, words = (None, "", samples) if isinstance(samples, str) else samples.place()
        except isolation.RerunEndedError as ended:
            samples, words = "", f"the search for the sample of the dataset ended: {ended}"
        incident.remark(*filter(None, [words]))
        if isinstance(samples, str):
            return None
        finding, start = incident.finding, BatchSnapshot(samples, (), grad=False)
        sought = replace(finding, label=samples.label, origin="received", source_module=None)
        made = self._find_in(start, sought, samples)
        if made.step and made.step.is_maker:
            finding = replace(made.finding, label=finding.label, index=finding.index, extent=describe(x))
            return start, made._replace(finding=finding, call=None)
        finding = replace(finding, place=place, operation=text, extent=describe(x))
        return None if place is None else (start, Diagnosis(finding))

    def examine_backward(self, snapshot: BatchSnapshot | None, call: ProgramCall | None) -> None:
        """Run the batch again with its backward to find the operation, cures and samples."""
        incident, remarks = self._incident, list[str]()
        finding, maker = incident.finding, None
        best: tuple[Diagnosis, BatchSnapshot] | None = None
        for start in self._starts(snapshot, call, remarks):
            diagnosis = self._find(start, replace(finding, remarks=()))
            if diagnosis.step is None:
                remarks.append("; ".join(diagnosis.finding.remarks))
                continue
            best = diagnosis, start
            # Else the loss reads a bad value with a graph that these statements did not make.
            if all(x.grad_fn is None for x in diagnosis.step.strangers):
                break
        if best is None:
            incident.remark(*dict.fromkeys(f"{remark}; {_ADVICE}" for remark in remarks))
            return
        (completed, step, *_), start = best
        incident.finding = replace(completed, remarks=(*finding.remarks, *completed.remarks))
        self.send()
        is_data = incident.finding.origin == "data"
        if is_data and (data := bad_tensors(getattr(start.module, "data", {}))):
            what = "the search for a sample"
            maker = attempt(what, partial(self._find_sample, data[0], start.seconds), incident.remark)
        if maker is None:
            self._cure(start, step, "forward" if call is not None and call.is_bad else "backward")
        else:
            incident.finding = replace(maker[1].finding, origin="data")
            self._cure(maker[0], maker[1].step, "forward", False)
        size = batch_size(start if snapshot is None else snapshot)
        is_part = isinstance(module := start.module, LossStatements)
        incident.remark(f"found by running {module.where if is_part else 'the batch without its loss'} again")
        if call is not None and is_part and incident.finding.is_of_loss:
            # The outputs have the samples, also where an attribute holds what the model was called with.
            for module in islice(call.statements(self._model, keeps_outputs=True), 1):
                start = replace(start, module=module, kwargs=module.inputs, draws=[])
        self._find_samples(start, size)

    def _starts(
        self, snapshot: BatchSnapshot | None, call: ProgramCall | None, remarks: list[str]
    ) -> Iterator[BatchSnapshot]:
        """Yield the starts from which the failure may come again, the exact ones first; remark why there are none.

        They are the statements of the program that computed the loss, with the model's calls. Where that shows
        nothing, a loss runs from the outputs of the model, and a backward of the model alone.
        """
        finding = self._incident.finding
        is_of_loss, label = finding.is_of_loss, finding.label
        kept = () if snapshot is None else (snapshot.buffers, snapshot.seconds)
        reason = "" if call is None else "its source was not found"
        # The outputs also hold what the program has changed since, such as the state of a recurrent model.
        for keeps_outputs in (False, True):
            if call is None or (keeps_outputs and not is_of_loss):
                break
            try:
                for statements in call.statements(self._model, keeps_outputs=keeps_outputs):
                    if statements.is_whole or is_of_loss:
                        reason = ""
                        for rng in call.rngs:
                            facts = statements.inputs, rng, call.autocast, False, True, ()
                            yield BatchSnapshot(statements, (), *facts, *kept)
            except Exception as error:
                reason = spell(error)
        if reason:
            remarks.append(f"the loss was not computed again: {reason}")
        if snapshot is not None and not (is_of_loss and label.startswith("output")):
            yield snapshot

    def _cure(self, start: BatchSnapshot, step: Step | None, phase: Phase, formats: bool = True) -> None:
        """Try changes of the source first, as they are the smallest, then other formats. `phase` is the source's."""
        incident, finding, statements = self._incident, self._incident.finding, start.module
        trials = self._trials(start, replace(finding, phase=phase))
        at = statements.target if isinstance(statements, LossStatements) else find_target
        patches, training = partial(try_patches, trials, step, at), partial(self._try_training, trials, step)
        growths = (x.abs_max / max(x.first, 1.0) for x in incident.report.suspects if x.first is not None)
        has_grown = bool(finding.losses) or any(growth > _MOST_GROWTH for growth in growths)
        try:
            if has_grown:
                attempt("a training from new weights", training, trials.remarks.append)
            attempt("the search for a change of the source", patches, trials.remarks.append)
            if formats and not finding.is_of_loss:
                # The cure is judged at the gradient, also where the loss fails.
                trials.finding = finding
                attempt("the search for another format", partial(try_formats, trials), trials.remarks.append)
            if not (has_grown or any(cure.works for cure in trials.cures)):
                attempt("a training from new weights", training, trials.remarks.append)
        finally:  # also where the clock ends a run
            incident.learn(cures=working_first(trials.cures))
            incident.remark(*trials.remarks)
            self.send()

    def _try_training(self, trials: Trials, step: Step | None) -> None:
        """Try a training, where steps were taken or a product of finite weights overflows."""
        has_steps, first = self._incident.finding.num_steps > 0, dict[str, float]()
        is_product = step is not None and operation_name(step.operation) in _PRODUCTS
        if is_product and all(x.dtype == "float32" for x in self._incident.finding.operands):
            suspects = [(f"{x.module}.{x.label}", x.first) for x in self._incident.report.suspects if x.first]
            first = {name.removeprefix("."): size for name, size in suspects}
            weights = [] if has_steps else [*self._model.named_parameters()]
            first |= {name: float(x.detach().abs().max()) for name, x in weights if x.numel()}
        if has_steps or first:
            try_training(trials, first)

    def _find_samples(self, start: BatchSnapshot, size: int) -> None:
        if not (self._incident.finding.transient or no_second_run(start.module) or start.doubts()):
            search = partial(find_samples, self._trials(start, self._incident.finding), size)
            if samples := attempt("the search for samples", search, self._incident.remark):
                self._incident.learn(samples=samples)
