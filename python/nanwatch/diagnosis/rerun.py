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
from ..report.finding import Finding, Value, with_earlier, working_first
from ..report.report import Report
from ..util.visible import spell
from . import isolation
from .batch_snapshot import BatchSnapshot, may_be_narrow, no_second_run, num_processes
from .cures import Cures, try_formats, try_patches
from .diagnosis import BackwardStart, Diagnosis, enrich
from .experiment import Allows, run
from .incident import Incident, attempt, write_failure
from .loss_statements import BackwardCall, LossStatements, Refused, loss_value
from .search import find_operation
from .trials import NO_CONDITIONS, Conditions

_ADVICE = 'put the loss into a function below `@nanwatch.watched("loss")`: a report then has its line and its operands'
_NOT_KEPT = (
    "its outermost call lies in compiled code or in a backward, the model was called again since, or what the call was"
    " given could not be kept"
)

# Runs of a part of the batch. One of 64 samples takes 9.
_MOST_RUNS = 24
# Arguments that say where samples stand in the dataset.
_INDICES = frozenset({"index", "indices", "idx", "ids", "sample_index", "sample_id", "sample_ids"})


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
    diagnosis: Diagnosis | None = None
    if examines and (reason or (snapshot is None and loss is None)):
        incident.remark(f"no re-run was made: {reason or _NOT_KEPT}")
    elif examines and loss is not None and (snapshot is None or incident.finding.is_of_loss):
        _rerun_loss(loss, incident, model, conditions, loss_value(loss))
    elif examines and snapshot is not None and incident.finding.phase != "step":
        before = incident.report
        diagnosis = _look(incident, snapshot, model, conditions)
        if loss is not None and diagnosis.operation is None:
            _rerun_after_module(loss, incident, before, model, conditions)
        else:
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


def dataset_indices(snapshot: BatchSnapshot, samples: Sequence[int]) -> str:
    """Return in words where these samples stand in the dataset, when the batch has a tensor that says so; else ""."""
    size = batch_size(snapshot)
    for label, x in call_leaves(snapshot.args, snapshot.kwargs):
        name = label.rpartition("[")[2].rstrip("]").lower()
        if name in _INDICES and isinstance(x, Tensor) and x.shape == (size,) and not x.is_floating_point():
            return f"{label} of these samples is {', '.join(map(str, x[list(samples)].tolist()))}"
    return ""
