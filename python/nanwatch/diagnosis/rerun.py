"""The re-run of a failed batch: find the operation, try cures, find the samples at fault, write it all down.

Each step may be missing a package, run out of memory or meet a model that cannot be run twice: then a remark says so,
and the report is what it was before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..instrumentation.wrapped_names import module_names
from ..precision.casting import replaced
from ..recording.walk import call_leaves
from ..report.finding import Value, with_earlier, working_first
from ..util.visible import spell
from . import isolation
from .batch_snapshot import BatchSnapshot, may_be_narrow, no_second_run, num_processes
from .cures import Cures, try_formats, try_patches
from .diagnosis import BackwardStart, Diagnosis, enrich
from .experiment import Allows, run
from .incident import Incident, attempt, write_failure
from .loss_statements import BackwardCall, LossStatements, Refused, loss_value, with_poles
from .search import find_operation
from .trials import NO_CONDITIONS, Conditions

_ADVICE = (
    "put the loss into a function below `@nanwatch.watched`: a report then has its line and its operands"
)
_NOT_KEPT = (
    "the start of the batch was not kept. Run it alone, uncompiled and with one call of the model, for that"
)

# Runs of a part of the batch. One of 64 samples takes 9.
_MOST_RUNS = 24


def examine(
    incident: Incident,
    snapshot: BatchSnapshot | None,
    model: nn.Module,
    output_dir: Path | None,
    *,
    examines: bool,
    reason: str = "",
    conditions: Conditions = NO_CONDITIONS,
    loss: BackwardCall | None = None,
) -> None:
    """Complete the incident by a re-run, if it `examines`, and write it to `output_dir`, if any.

    `snapshot` is None where the batch cannot be run again; a `reason` says in words why it must not be. `loss` is the
    backward of a loss outside all modules that made the value.
    """
    run, diagnosis = _Rerun(incident, model, conditions), None
    if examines and (reason or (snapshot is None and loss is None)):
        incident.remark(f"no re-run was made: {reason or _NOT_KEPT}")
    elif examines and loss is not None and (snapshot is None or incident.finding.is_of_loss):
        run.examine_loss(loss, loss_value(loss))
    elif examines and snapshot is not None and incident.finding.phase != "step":
        diagnosis = run.examine_batch(snapshot, loss)
    finding = incident.finding
    if loss is not None and finding.is_of_loss and finding.operation is None:
        poles = attempt("reading the loss's graph", partial(with_poles, finding, loss), incident.remark)
        incident.finding = poles or incident.finding
    if output_dir is not None:
        run.send()
        write_failure(incident, diagnosis, snapshot, output_dir)


class _Rerun:
    """The re-run of one incident's batch, which completes the incident."""

    def __init__(self, incident: Incident, model: nn.Module, conditions: Conditions) -> None:
        self._incident = incident
        self._model = model
        self._conditions = conditions

    def send(self) -> None:
        """Send what is known to the process of the program, should a later step not end."""
        isolation.send(self._incident.report.to_json())

    def examine_batch(self, snapshot: BatchSnapshot, loss: BackwardCall | None) -> Diagnosis:
        """Run the batch again to find the operation, cures and samples; then the loss, if nothing was found."""
        incident, before = self._incident, self._incident.report
        finding, frames = incident.finding, before.frames
        diagnosis = find_operation(snapshot, finding, model=self._model, frames=frames)
        incident.finding = enrich(finding, diagnosis)
        if diagnosis.holder is not None:
            incident.report = replace(incident.report, frames=tuple(with_earlier(frames, diagnosis.holder)))
        self.send()
        is_due = diagnosis.step is not None
        if finding.phase != "backward":
            was_there = finding.origin in ("data", "buffer") and diagnosis.place is not None
            is_due = diagnosis.transient is False or was_there
            if is_due and (doubts := snapshot.doubts()):
                incident.remark(f"no cure was tried, as {doubts[0]}")
                is_due = False
        if is_due:
            attempt("trying cures", partial(self._cure, snapshot, diagnosis), incident.remark)
        if loss is None or diagnosis.step is not None:
            self.send()
            self._find_samples(snapshot, diagnosis)
            return diagnosis
        # The derivative of a gradient reaches weights past their modules' outputs.
        shown, finding, incident.report = incident.report, incident.finding, before
        incident.learn(origin="received", source_module=None)
        self.examine_loss(loss, None)
        if incident.finding.operation is None:
            incident.report = shown
        elif incident.finding.source_module == finding.module:
            incident.learn(origin=finding.origin, source_module=finding.source_module)
        return diagnosis

    def _cure(self, snapshot: BatchSnapshot, diagnosis: Diagnosis) -> None:
        """Try changes of the source first, as they are the smallest, then other formats."""
        finding, start = self._incident.finding, diagnosis.start
        model, conditions = self._model, self._conditions
        cures, remarks = try_patches(snapshot, finding, model, diagnosis, conditions=conditions)
        is_due = start is not None or may_be_narrow(snapshot, finding) or not any(x.works for x in cures)
        if is_due and (start is not None or finding.phase != "backward"):
            formats = try_formats(snapshot, finding, model, start=start, conditions=conditions)
            cures, remarks = (*cures, *formats[0]), (*remarks, *formats[1])
        self._incident.learn(cures=working_first(cures))
        self._incident.remark(*remarks)

    def _find_samples(self, snapshot: BatchSnapshot, diagnosis: Diagnosis) -> None:
        """Look for the samples that carry the failure, unless a second run says little."""
        incident = self._incident
        is_known = diagnosis.step is not None or incident.finding.origin == "data"
        if not is_known or diagnosis.transient or no_second_run(snapshot.module) or snapshot.doubts():
            return
        names, allows = module_names(self._model), self._conditions.allows
        search = partial(find_samples, snapshot, names, allows=allows, start=diagnosis.start)
        samples = attempt("the search for samples", search, incident.remark)
        if samples:
            incident.learn(samples=samples)

    def examine_loss(self, call: BackwardCall, value: Value | None) -> None:
        """Complete the finding with the operation, line and cures that a re-run of the loss's statements shows.

        `value` is that of the loss, which its forward made; None where its backward did. Raises nothing of its own:
        what could not be done is a remark.
        """
        incident = self._incident
        try:
            if num_processes() > 1:
                raise Refused("other ranks would have to run it along")
            statements = call.statements(self._model)
            diagnosis, (cures, tried) = self._run_statements(statements, call, value)
        except Refused as reason:
            incident.remark(f"the loss was not computed again: {reason}; {_ADVICE}")
            return
        except Exception as error:
            incident.remark(f"the loss could not be computed again: {spell(error)}; {_ADVICE}")
            return
        first, last = statements.lines
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        where = f"{lines} of {statements.filename}"
        if diagnosis.step is None:
            why = "; ".join(diagnosis.remarks) or "the value did not come back"
            incident.remark(f"the loss was computed again by {where}: {why}; {_ADVICE}")
            return
        # The derivative of a gradient runs through the model's own operations once more. `extent` and `index` would be
        # those of the loss, where the finding is of a gradient.
        made_in = _below(diagnosis.made_in or "") or None
        shown = replace(diagnosis, made_in=made_in, remarks=diagnosis.step.remarks, extent="", index=None)
        incident.finding = enrich(incident.finding, shown)
        incident.learn(cures=cures)
        incident.remark(*tried, f"found by running {where} again")

    def _run_statements(
        self, statements: LossStatements, call: BackwardCall, value: Value | None
    ) -> tuple[Diagnosis, Cures]:
        # The finding of a call of the statements, that returns the loss.
        facts = {"module": "", "label": "output", "origin": "produced", "source_module": None}
        finding = replace(self._incident.finding, **facts, operation=None, place=None)  # type: ignore[arg-type]
        if value is not None:
            finding = replace(finding, phase="forward", value=value)
        for rng in call.rngs:
            snapshot = BatchSnapshot(
                statements, (), statements.inputs, rng, call.autocast, inference=False, grad=True
            )
            diagnosis = find_operation(snapshot, finding, model=statements)
            if diagnosis.step is not None:
                break
        if diagnosis.step is None:
            return diagnosis, ((), ())
        allows = self._conditions.allows
        conditions = self._conditions._replace(allows=lambda name, module: allows(_below(name), module))
        finding, at = enrich(finding, diagnosis), statements.target
        return diagnosis, try_patches(snapshot, finding, statements, diagnosis, conditions=conditions, at=at)


def _below(name: str) -> str:
    """Return the name in the model of a module of the statements."""
    return name.removeprefix("model").removeprefix(".")


# Samples of a batch without which it is finite


def find_samples(
    snapshot: BatchSnapshot,
    names: Mapping[nn.Module, str],
    *,
    allows: Allows,
    start: BackwardStart | None = None,
) -> tuple[int, ...]:
    """Return the samples without which the batch is finite, and which are not finite alone; () where none are known.

    `start` is where the backward of the batch failed. Samples are numbered by the first dimension of what the batch was
    called with. Nothing is told where tensors there have different first dimensions, where half of the samples or more
    would be needed, or where a run without them fails, as one does whose samples depend on each other.
    """
    size, num_runs = batch_size(snapshot), 0

    def is_finite(samples: Sequence[int]) -> bool | None:
        """Run these samples alone. Return whether all is finite, None where the run raised or is one too many."""
        nonlocal num_runs
        num_runs += 1
        if num_runs > _MOST_RUNS:
            return None

        def chosen(x: Tensor) -> Tensor | None:
            # Detached: the graph behind it is the user's.
            is_batch = x.ndim > 0 and x.shape[0] == size
            return x.detach()[list(samples)].requires_grad_(x.requires_grad) if is_batch else None

        args, kwargs = replaced((snapshot.args, dict(snapshot.kwargs)), chosen)
        begin = start and start._replace(gradients=replaced(dict(start.gradients), chosen))
        part = replace(snapshot, args=args, kwargs=kwargs)
        experiment = run(part, names, allows=allows, start=begin)
        if experiment.error is not None:
            return None
        return not experiment.bad_labels() and not experiment.has_bad_gradients

    bad: list[int] = []
    rest = list(range(size))
    while 2 * (len(bad) + 1) <= size and num_runs < _MOST_RUNS:
        # Find the shortest beginning that is not finite: its last sample is bad.
        low, high = 0, len(rest)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_finite(rest[:middle]) is False else (middle, high)
        bad.append(rest.pop(high - 1))
        if is_finite(rest):
            return tuple(sorted(bad)) if is_finite(bad) is False else ()
    return ()


def batch_size(snapshot: BatchSnapshot) -> int:
    """Return the number of samples; 0 where the tensors of the call do not agree on it."""
    tensors = [x for _, x in call_leaves(snapshot.args, snapshot.kwargs) if isinstance(x, Tensor)]
    if any(x.layout is not torch.strided or x.is_nested for x in tensors):
        return 0
    sizes = {x.shape[0] for x in tensors if x.ndim}
    return sizes.pop() if len(sizes) == 1 else 0
