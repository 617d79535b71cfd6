"""The re-run of a failed batch: find the operation, try cures, find the samples at fault, write it all down.

Each step may be missing a package, run out of memory or meet a model that cannot be run twice: then a remark says so,
and the report is what it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, log2
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..instrumentation.wrapped_names import module_names
from ..precision.casting import replaced
from ..recording.walk import call_leaves
from ..report.finding import Cure, Finding, Value, with_earlier, working_first
from ..report.report import Report
from ..util.visible import spell
from . import child_process
from .backward_cures import try_backward_cures
from .backward_rerun import loss_value, rerun_backward
from .batch_snapshot import BatchSnapshot, Forwards, may_be_narrow, no_second_run, num_processes
from .cures import try_cures
from .diagnosis import BackwardStart, BadRows, Diagnosis, enrich
from .experiment import NO_CONDITIONS, Allows, Conditions, module_words, nothing_allowed, run
from .folder import attempt, write_failure
from .forward_rerun import rerun_forward
from .incident import Incident
from .loss_slice import Refused
from .loss_statements import BackwardCall, LossStatements
from .patching.module_options import SearchResult
from .patching.rounds import try_patches

_ADVICE = 'put the loss into a function below `@nanwatch.watched("loss")`: a report then has its line and its operands'


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
    if incident.report.finding is None:
        return
    diagnosis: Diagnosis | None = None
    if examines and (reason or (snapshot is None and loss is None)):
        why = reason or (
            "its outermost call lies in compiled code or in a backward, the model was called again since, or what the"
            " call was given could not be kept"
        )
        incident.remark(f"no re-run was made: {why}")
    elif examines and loss is not None and (snapshot is None or incident.finding.is_of_loss):
        _rerun_loss(loss, incident, model, conditions, loss_value(loss))
    elif examines and snapshot is not None and incident.finding.phase != "step":
        before = incident.report
        snapshot = replace(snapshot, forwards=Forwards())
        steps = _Steps(incident, model, conditions)
        diagnosis, call = steps.look(snapshot), incident.call
        if (
            call is not None
            and incident.finding.origin == "produced"
            and not (diagnosis and diagnosis.operation)
        ):
            incident.remark(
                f"{module_words(incident.finding.module)} was run alone, with what the failed call was given"
            )
            diagnosis = steps.look(call)
        elif loss is not None and not (diagnosis and diagnosis.operation):
            _rerun_after_module(loss, incident, before, model, conditions)
        elif diagnosis is not None:
            _tell(incident)
            steps.find_samples(diagnosis, snapshot)
    if output_dir is not None:
        _tell(incident)
        write_failure(incident, diagnosis, snapshot, output_dir)


def _tell(incident: Incident) -> None:
    """Send what is known to the process of the program, should a later step not end."""
    child_process.send(incident.report.to_json())


class _Steps(NamedTuple):
    """Steps of an examination. Each completes the finding of the incident with what it shows."""

    incident: Incident
    model: nn.Module
    conditions: Conditions

    def look(self, snapshot: BatchSnapshot) -> Diagnosis | None:
        """Run the batch again to find the operation, and try cures where it failed again."""
        incident, finding = self.incident, self.incident.finding
        if finding.phase == "backward":
            diagnosis: Diagnosis | None = rerun_backward(
                snapshot, finding, incident.report.frames, model=self.model
            )
        else:
            rerun = partial(rerun_forward, snapshot, finding, model=self.model)
            diagnosis = attempt("the re-run", rerun, incident.remark)
        if diagnosis is None:
            return None
        incident.finding = enrich(finding, diagnosis)
        if diagnosis.holder is not None:
            frames = with_earlier(incident.report.frames, diagnosis.holder)
            incident.report = replace(incident.report, frames=tuple(frames))
        _tell(incident)
        is_due = diagnosis.operation is not None
        if finding.phase != "backward":
            was_there = finding.origin in ("data", "buffer") and diagnosis.place is not None
            is_due = diagnosis.transient is False or was_there
            if is_due and (doubts := snapshot.doubts()):
                incident.remark(f"no cure was tried, as {doubts[0]}")
                is_due = False
        if is_due:
            attempt("trying cures", partial(self._cure, diagnosis, snapshot), incident.remark)
        return diagnosis

    def _cure(self, diagnosis: Diagnosis, snapshot: BatchSnapshot) -> None:
        """Try changes of the source first, as they are the smallest, then other formats."""
        finding = self.incident.finding
        start, is_narrow = diagnosis.start, may_be_narrow(snapshot, finding)
        patches = try_patches(snapshot, finding, self.model, diagnosis, conditions=self.conditions)
        formats: tuple[tuple[Cure, ...], tuple[str, ...]] = (), ()
        if start is not None:
            formats = try_backward_cures(snapshot, self.model, start, loss_scale=self.conditions.loss_scale)
        elif finding.phase != "backward" and (is_narrow or not any(cure.works for cure in patches.cures)):
            formats = try_cures(snapshot, finding, self.model, conditions=self.conditions)
        self.incident.learn(cures=working_first([*patches.cures, *formats[0]]))
        self.incident.remark(*patches.remarks, *formats[1])

    def find_samples(self, diagnosis: Diagnosis, snapshot: BatchSnapshot) -> None:
        """Look for the samples that carry the failure, if the remaining forwards can show them."""
        if not diagnosis.rows or diagnosis.transient or no_second_run(snapshot.module) or snapshot.doubts():
            return
        samples = attempt(
            "the search for samples",
            lambda: find_samples(
                snapshot,
                module_names(self.model),
                diagnosis.rows,
                _MOST_SAMPLE_RUNS,
                allows=self.conditions.allows,
                start=diagnosis.start,
            ),
            self.incident.remark,
        )
        if samples:
            self.incident.learn(samples=samples)
            if indices := dataset_indices(snapshot, samples):
                self.incident.remark(indices)


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
        diagnosis, patches = _examined(statements, call, finding, conditions, value)
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
    incident.learn(cures=working_first(patches.cures))
    incident.remark(*patches.remarks, f"found by running {where} again")


def _examined(
    statements: LossStatements,
    call: BackwardCall,
    finding: Finding,
    conditions: Conditions,
    value: Value | None,
) -> tuple[Diagnosis, SearchResult]:
    snapshot = BatchSnapshot(
        statements,
        (),
        statements.inputs,
        call.rng,
        call.autocast,
        inference=False,
        grad=True,
        forwards=Forwards(),
    )
    # The finding of a call of this module, that returns the loss.
    own = replace(
        finding, module="", label="output", origin="produced", source_module=None, operation=None, place=None
    )
    conditions = conditions._replace(allows=_below(conditions.allows))
    if value is None:
        found = rerun_backward(snapshot, own, (), model=statements)
    else:
        own = replace(own, phase="forward", value=value)
        found = rerun_forward(snapshot, own, model=statements)
    if found.operation is None:
        return found, SearchResult()
    tried = try_patches(
        snapshot,
        enrich(own, found),
        statements,
        found,
        conditions=conditions,
        at=statements.target,
    )
    # `extent` and `index` would be those of the loss, where the finding is of a gradient.
    return replace(found, remarks=(), extent="", index=None), tried


def _below(allows: Allows) -> Allows:
    """Return the same for the names of the model's modules below the statements."""

    def allowed(name: str, module: nn.Module) -> Any:
        inner = name.removeprefix("model").removeprefix(".")
        return allows(inner, module) if name.startswith("model") else nothing_allowed(name, module)

    return allowed


# Runs that prove the answer: one without the samples and one with them alone. A bisection takes one for each halving.
_PROOF = 2
_MOST_SAMPLE_RUNS = 16
# Arguments that say where samples stand in the dataset.
_INDICES = frozenset({"index", "indices", "idx", "ids", "sample_index", "sample_id", "sample_ids"})


def find_samples(
    snapshot: BatchSnapshot,
    names: Mapping[nn.Module, str],
    seen: Iterable[BadRows],
    most_runs: int,
    *,
    allows: Allows = nothing_allowed,
    start: BackwardStart | None = None,
) -> tuple[int, ...]:
    """Return the fewest samples that carry the failure, in at most so many runs; () where none are known to.

    `seen` are the bad rows of tensors of the failed run, `start` is where its backward failed. Samples are numbered by
    the first dimension of what the batch was called with. Nothing is told where tensors there have different first
    dimensions, where more than half of the samples would be needed, or where a run without them fails, as one does
    whose samples depend on each other.
    """
    size = batch_size(snapshot)
    if size < 2 or most_runs < _PROOF:
        return ()

    def is_finite(samples: Sequence[int]) -> bool | None:
        """Run these samples alone. Return whether all is finite, None where the run raised."""

        def chosen(x: Tensor) -> Tensor | None:
            # Detached: the graph behind it is the user's.
            is_batch = x.ndim > 0 and x.shape[0] == size
            return x.detach()[list(samples)].requires_grad_(x.requires_grad) if is_batch else None

        args, kwargs = replaced((snapshot.args, dict(snapshot.kwargs)), chosen)
        begin = start and start._replace(gradients=replaced(dict(start.gradients), chosen))
        part = replace(snapshot, args=args, kwargs=kwargs)
        experiment = run(part, names, allows=allows, backward=snapshot.grad, start=begin)
        if experiment.error is not None:
            return None
        return not any(experiment.nonfinite()) and not experiment.bad_gradients

    def is_finite_without(samples: Sequence[int]) -> bool:
        left_out = set(samples)
        return is_finite([i for i in range(size) if i not in left_out]) is True

    found = min(_candidates(seen, size), key=len, default=())
    if found:
        is_cause = is_finite_without(found)
    else:
        is_cause = most_runs >= ceil(log2(size)) + _PROOF and bool(found := _halve(size, is_finite_without))
    return found if is_cause and is_finite(found) is False else ()


def _halve(size: int, is_finite_without: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
    """Return the one sample without which the batch is finite; () where one is not enough."""
    suspects = range(size)
    is_proven = False
    while len(suspects) > 1:
        middle = len(suspects) // 2
        is_proven = is_finite_without(suspects[:middle])
        suspects = suspects[:middle] if is_proven else suspects[middle:]
    return tuple(suspects) if is_proven or is_finite_without(suspects) else ()


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


def _candidates(seen: Iterable[BadRows], size: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of samples that the bad rows of a tensor belong to, each of at most half of the batch."""
    for one in seen:
        # Batch and time, or batch and heads, are often flattened into the first dimension.
        matching = [
            (length // size, rows)
            for dim, (length, rows) in enumerate(one)
            if length == size or (dim == 0 and length % size == 0)
        ]
        for per_sample, rows in matching[:1]:
            samples = tuple(sorted({row // per_sample for row in rows}))
            if 0 < 2 * len(samples) <= size:
                yield samples
