"""The re-run of a failed batch: find the operation, try cures, find the samples at fault, write it all down.

Each step may be missing a package, run out of memory or meet a model that cannot be run twice: then a remark says so,
and the report is what it was before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from ..instrumentation.wrapped_names import module_names
from ..report.finding import Finding, Value, with_earlier, working_first
from ..report.report import Report
from ..util.visible import spell
from . import isolation
from .batch_snapshot import BatchSnapshot, may_be_narrow, no_second_run, num_processes
from .cures import Cures, module_words, try_formats, try_patches
from .diagnosis import Diagnosis, enrich
from .experiment import Allows
from .incident import Incident, attempt, write_failure
from .loss_statements import BackwardCall, LossStatements, Refused, loss_value
from .samples import dataset_indices, find_samples
from .search import find_operation
from .trials import NO_CONDITIONS, Conditions

_ADVICE = 'put the loss into a function below `@nanwatch.watched("loss")`: a report then has its line and its operands'
_NOT_KEPT = (
    "its outermost call lies in compiled code or in a backward, the model was called again since, or what the call was"
    " given could not be kept"
)


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

    `snapshot` is None where the batch cannot be run again; a `reason` says in words why it must not be. The incident's
    failed call runs where the batch shows nothing. `loss` is the backward of a loss outside all modules that made the
    value.
    """
    diagnosis: Diagnosis | None = None
    if examines and (reason or (snapshot is None and loss is None)):
        incident.remark(f"no re-run was made: {reason or _NOT_KEPT}")
    elif examines and loss is not None and (snapshot is None or incident.finding.is_of_loss):
        _rerun_loss(loss, incident, model, conditions, loss_value(loss))
    elif examines and snapshot is not None and incident.finding.phase != "step":
        before = incident.report
        diagnosis, call = _look(incident, snapshot, model, conditions), incident.call
        is_known = diagnosis is not None and diagnosis.operation is not None
        if call is not None and incident.finding.origin == "produced" and not is_known:
            words = module_words(incident.finding.module)
            incident.remark(f"{words} was run alone, with what the failed call was given")
            diagnosis = _look(incident, call, model, conditions)
        elif loss is not None and not is_known:
            _rerun_after_module(loss, incident, before, model, conditions)
        elif diagnosis is not None:
            _tell(incident)
            _find_samples(incident, snapshot, model, conditions, diagnosis)
    if output_dir is not None:
        _tell(incident)
        write_failure(incident, diagnosis, snapshot, output_dir)


def _tell(incident: Incident) -> None:
    """Send what is known to the process of the program, should a later step not end."""
    isolation.send(incident.report.to_json())


def _look(incident: Incident, snapshot: BatchSnapshot, model: nn.Module, conditions: Conditions) -> Diagnosis:
    """Run the batch again to find the operation, and try cures where it failed again."""
    finding, frames = incident.finding, incident.report.frames
    diagnosis = find_operation(snapshot, finding, model=model, frames=frames)
    incident.finding = enrich(finding, diagnosis)
    if diagnosis.holder is not None:
        incident.report = replace(incident.report, frames=tuple(with_earlier(frames, diagnosis.holder)))
    _tell(incident)
    is_due = diagnosis.operation is not None
    if finding.phase != "backward":
        was_there = finding.origin in ("data", "buffer") and diagnosis.place is not None
        is_due = diagnosis.transient is False or was_there
        if is_due and (doubts := snapshot.doubts()):
            incident.remark(f"no cure was tried, as {doubts[0]}")
            is_due = False
    if is_due:
        cure = partial(_cure, incident, snapshot, model, conditions, diagnosis)
        attempt("trying cures", cure, incident.remark)
    return diagnosis


def _cure(
    incident: Incident,
    snapshot: BatchSnapshot,
    model: nn.Module,
    conditions: Conditions,
    diagnosis: Diagnosis,
) -> None:
    """Try changes of the source first, as they are the smallest, then other formats."""
    finding, start = incident.finding, diagnosis.start
    cures, remarks = try_patches(snapshot, finding, model, diagnosis, conditions=conditions)
    is_due = start is not None or may_be_narrow(snapshot, finding) or not any(cure.works for cure in cures)
    if is_due and (start is not None or finding.phase != "backward"):
        formats = try_formats(snapshot, finding, model, start=start, conditions=conditions)
        cures, remarks = (*cures, *formats[0]), (*remarks, *formats[1])
    incident.learn(cures=working_first(cures))
    incident.remark(*remarks)


def _find_samples(
    incident: Incident,
    snapshot: BatchSnapshot,
    model: nn.Module,
    conditions: Conditions,
    diagnosis: Diagnosis,
) -> None:
    """Look for the samples that carry the failure, unless a second run says little."""
    is_known = diagnosis.operation is not None or incident.finding.origin == "data"
    if not is_known or diagnosis.transient or no_second_run(snapshot.module) or snapshot.doubts():
        return
    search = partial(
        find_samples, snapshot, module_names(model), allows=conditions.allows, start=diagnosis.start
    )
    samples = attempt("the search for samples", search, incident.remark)
    if samples:
        incident.learn(samples=samples)
        if indices := dataset_indices(snapshot, samples):
            incident.remark(indices)


def _rerun_after_module(
    call: BackwardCall, incident: Incident, before: Report, model: nn.Module, conditions: Conditions
) -> None:
    """Look for the operation in a backward from the loss, as a re-run of the module of `before` has shown nothing.

    The derivative of a gradient reaches weights past their modules' outputs.
    """
    shown, incident.report = incident.report, before
    finding = incident.finding
    incident.learn(origin="received", source_module=None)
    _rerun_loss(call, incident, model, conditions, None)
    if incident.finding.operation is None:
        incident.report = shown
    elif incident.finding.source_module == finding.module:
        incident.learn(origin=finding.origin, source_module=finding.source_module)


def _rerun_loss(
    call: BackwardCall, incident: Incident, model: nn.Module, conditions: Conditions, value: Value | None
) -> None:
    """Complete the finding with the operation, line and cures that a re-run of the loss's statements shows.

    `value` is that of the loss, which its forward made; None where its backward did. Raises nothing of its own: what
    could not be done is a remark.
    """
    finding = incident.finding
    try:
        if num_processes() > 1:
            raise Refused("other ranks would have to run it along")
        statements = call.statements(model)
        diagnosis, (cures, tried) = _examined(statements, call, finding, conditions, value)
    except Refused as reason:
        incident.remark(f"the loss was not computed again: {reason}; {_ADVICE}")
        return
    except Exception as error:
        incident.remark(f"the loss could not be computed again: {spell(error)}; {_ADVICE}")
        return
    first, last = statements.lines
    lines = f"line {first}" if first == last else f"lines {first} to {last}"
    where = f"{lines} of {statements.filename}"
    if diagnosis.operation is None:
        why = "; ".join(diagnosis.remarks) or "the value did not come back"
        incident.remark(f"the loss was computed again by {where}: {why}; {_ADVICE}")
        return
    # Without the operations that the graph made likely.
    incident.learn(remarks=tuple(x for x in finding.remarks if x != call.remark))
    # The derivative of a gradient runs through the model's own operations once more.
    made_in = (diagnosis.made_in or "").removeprefix("model").removeprefix(".")
    incident.finding = enrich(incident.finding, replace(diagnosis, made_in=made_in or None))
    incident.learn(cures=cures)
    incident.remark(*tried, f"found by running {where} again")


def _examined(
    statements: LossStatements,
    call: BackwardCall,
    finding: Finding,
    conditions: Conditions,
    value: Value | None,
) -> tuple[Diagnosis, Cures]:
    snapshot = BatchSnapshot(
        statements,
        (),
        statements.inputs,
        call.rng,
        call.autocast,
        inference=False,
        grad=True,
    )
    # The finding of a call of this module, that returns the loss.
    finding = replace(
        finding, module="", label="output", origin="produced", source_module=None, operation=None, place=None
    )
    conditions = conditions._replace(allows=_below(conditions.allows))
    if value is not None:
        finding = replace(finding, phase="forward", value=value)
    diagnosis = find_operation(snapshot, finding, model=statements)
    if diagnosis.operation is None:
        return diagnosis, ((), ())
    patches = try_patches(
        snapshot,
        enrich(finding, diagnosis),
        statements,
        diagnosis,
        conditions=conditions,
        at=statements.target,
    )
    # `extent` and `index` would be those of the loss, where the finding is of a gradient.
    return replace(diagnosis, remarks=(), extent="", index=None), patches


def _below(allows: Allows) -> Allows:
    """Return the same for the names of the model's modules below the statements."""
    return lambda name, module: allows(name.removeprefix("model").removeprefix("."), module)
