"""The re-run of a failed batch: find the operation, try cures, find the samples at fault, write it all down.

Each step may be missing a package, run out of memory or meet a model that cannot be run twice: then a remark says so,
and the report is what it was before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from ..precision.casting import replaced
from ..recording.walk import call_leaves
from ..records.record import Phase
from ..report.finding import with_earlier, working_first
from ..util.visible import spell
from . import isolation
from .batch_snapshot import BatchSnapshot, no_second_run
from .cures import try_formats, try_patches
from .experiment import Allows, nothing_allowed
from .incident import Incident, attempt, write_failure
from .loss_statements import LossStatements, ProgramCall, Refused
from .patching.source import find_target
from .search import Diagnosis, enrich, find_operation
from .trials import Trials

_ADVICE = "put the loss into a function below `@nanwatch.watched`: a report then has its line and operands"
_NOT_KEPT = (
    "the start of the batch was not kept. Run it alone, uncompiled, with one call of the model, for that"
)
_AGAIN = "found by running {} again"
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
    call: ProgramCall | None = None,
    allows: Allows = nothing_allowed,
    loss_scale: float | None = None,
) -> None:
    """Complete the incident by a re-run, if it `examines`, and write it to `output_dir`, if any.

    `snapshot` is None where the batch cannot be run again; a `reason` says in words why it must not be. `call` is the
    program's: the backward or the step that failed. `loss_scale` is None where it is not known.
    `allows` tells which infinities are meant.
    """
    run = _Rerun(incident, model, allows, loss_scale)
    try:
        if examines and (reason or (snapshot is None and call is None)):
            incident.remark(f"no re-run was made: {reason or _NOT_KEPT}")
        elif examines and incident.finding.phase in ("backward", "step"):
            run.examine_backward(snapshot, call)
        elif examines and snapshot is not None:
            run.examine_batch(snapshot)
    except isolation.RerunEndedError as ended:
        incident.remark(f"the re-run of the batch ended: {ended}")
    if output_dir is not None:
        run.send()
        write_failure(incident, run.call, output_dir)


class _Rerun:
    """The re-run of one incident's batch, which completes the incident. `call` is that in which a forward failed."""

    call: BatchSnapshot | None = None

    def __init__(self, incident: Incident, model: nn.Module, allows: Allows, scale: float | None) -> None:
        self._incident, self._model, self._allows = incident, model, allows
        self._trials = partial(Trials, model=model, allows=allows, loss_scale=scale)

    def send(self) -> None:
        """Send what is known to the process of the program, should a later step not end."""
        isolation.send(self._incident.report.to_json())

    def examine_batch(self, snapshot: BatchSnapshot) -> None:
        """Run the forward of the batch again to find the operation, cures and samples."""
        incident, finding = self._incident, self._incident.finding
        diagnosis = find_operation(snapshot, finding, model=self._model, allows=self._allows)
        self.call = diagnosis.call
        self._learn(diagnosis)
        if diagnosis.holder is not None:
            frames = with_earlier(incident.report.frames, diagnosis.holder)
            incident.report = replace(incident.report, frames=tuple(frames))
        was_there = finding.origin in ("data", "buffer") and diagnosis.step is not None
        if diagnosis.transient is False or was_there:
            if doubts := snapshot.doubts():
                incident.remark(f"no cure was tried, as {doubts[0]}")
            else:
                self._cure(snapshot, diagnosis, "forward")
        if diagnosis.step is not None or incident.finding.origin == "data":
            self._find_samples(snapshot, diagnosis, batch_size(snapshot))

    def examine_backward(self, snapshot: BatchSnapshot | None, call: ProgramCall | None) -> None:
        """Run the batch again with its backward to find the operation, cures and samples."""
        incident, remarks = self._incident, [call.between] if call is not None and call.between else []
        best: tuple[Diagnosis, BatchSnapshot] | None = None
        for start in self._starts(snapshot, call, remarks):
            diagnosis = find_operation(start, incident.finding, model=self._model, allows=self._allows)
            if diagnosis.step is not None:
                best = diagnosis, start
                # Else the loss reads a bad value with a graph that these statements did not make.
                if all(x.grad_fn is None for x in diagnosis.step.strangers):
                    break
            elif diagnosis.remarks:
                remarks.append("; ".join(diagnosis.remarks))
        if best is None:
            advice = "" if incident.finding.phase == "step" else f"; {_ADVICE}"
            incident.remark(*dict.fromkeys(f"{remark}{advice}" for remark in remarks))
            return
        diagnosis, start = best
        self._learn(diagnosis)
        self._cure(start, diagnosis, "forward" if call is not None and call.is_bad else "backward")
        size = batch_size(start if snapshot is None else snapshot)
        is_part = isinstance(module := start.module, LossStatements)
        incident.remark(_AGAIN.format(module.where if is_part else "the batch without its loss"))
        if call is not None and is_part and incident.finding.is_of_loss:
            # The outputs have the samples, also where an attribute holds what the model was called with.
            with suppress(Refused):
                for module in islice(call.statements(self._model, keeps_outputs=True), 1):
                    start = replace(start, module=module, kwargs=module.inputs, draws=[])
        if incident.finding.phase == "backward":
            self._find_samples(start, diagnosis, size)

    def _learn(self, diagnosis: Diagnosis) -> None:
        self._incident.finding = enrich(self._incident.finding, diagnosis)
        self.send()

    def _starts(
        self, snapshot: BatchSnapshot | None, call: ProgramCall | None, remarks: list[str]
    ) -> Iterator[BatchSnapshot]:
        """Yield the starts from which the failure may come again, the exact ones first; remark why there are none.

        They are the statements of the program that computed the loss, with the model's calls. Where that shows
        nothing, a loss runs from the outputs of the model, and a backward of the model alone.
        """
        phase, is_of_loss = self._incident.finding.phase, self._incident.finding.is_of_loss
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
                reason = str(error) if isinstance(error, Refused) else spell(error)
        if reason:
            what = "loss was" if phase == "backward" else "gradients were"
            remarks.append(f"the {what} not computed again: {reason}")
        if snapshot is not None and phase == "backward" and not is_of_loss:
            yield snapshot

    def _cure(self, start: BatchSnapshot, diagnosis: Diagnosis, phase: Phase) -> None:
        """Try changes of the source first, as they are the smallest, then other formats. `phase` is the source's."""
        incident, finding, statements = self._incident, self._incident.finding, start.module
        trials = self._trials(start, replace(finding, phase=phase))
        at = statements.target if isinstance(statements, LossStatements) else find_target
        patches = partial(try_patches, trials, diagnosis.step, at)
        try:
            attempt("the search for a change of the source", patches, trials.remarks.append)
            if not (finding.is_of_loss or finding.phase == "step"):
                # The cure is judged at the gradient, also where the loss fails.
                trials.finding = finding
                attempt("the search for another format", partial(try_formats, trials), trials.remarks.append)
        finally:  # also where the clock ends a run
            incident.learn(cures=working_first(trials.cures))
            incident.remark(*trials.remarks)
            self.send()

    def _find_samples(self, start: BatchSnapshot, diagnosis: Diagnosis, size: int) -> None:
        """Look for the samples that carry the failure, unless a second run says little."""
        if not (diagnosis.transient or no_second_run(start.module) or start.doubts()):
            search = partial(find_samples, self._trials(start, self._incident.finding), size)
            if samples := attempt("the search for samples", search, self._incident.remark):
                self._incident.learn(samples=samples)


# Samples of a batch without which it is finite


def find_samples(trials: Trials, size: int) -> tuple[int, ...]:
    """Return the samples without which the batch is finite, and which are not finite alone; () where none are known.

    `size` is the number of samples, which are numbered by the first dimension of what the batch was called with.
    Nothing is told where half of the samples or more would be needed, or where a run without them fails, as one does
    whose samples depend on each other.
    """
    start = trials.snapshot

    def is_finite(samples: Sequence[int]) -> bool | None:
        """Run these samples alone. Return whether all is finite, None where the run raised or is one too many."""
        if trials.runs >= _MOST_RUNS:
            return None

        def chosen(x: Tensor) -> Tensor | None:
            # Detached: the graph behind it is the user's.
            is_batch = x.ndim > 0 and x.shape[0] == size
            return x.detach()[list(samples)].requires_grad_(x.requires_grad) if is_batch else None

        args, kwargs = replaced((start.args, dict(start.kwargs)), chosen)
        experiment = trials.run(snapshot=replace(start, args=args, kwargs=kwargs))
        return not experiment.bad_labels() if experiment.error is None else None

    bad, rest = list[int](), list(range(size))
    while 2 * (len(bad) + 1) <= size and trials.runs < _MOST_RUNS:
        # The last sample of the shortest beginning that is not finite is bad.
        most = range(1, len(rest))
        bad.append(rest.pop(bisect_left(most, True, key=lambda count: is_finite(rest[:count]) is False)))
        if is_finite(rest):
            return tuple(sorted(bad)) if is_finite(bad) is False else ()
    return ()


def batch_size(snapshot: BatchSnapshot) -> int:
    """Return the number of samples; 0 where the tensors of the call do not agree on it."""
    tensors = [x for _, x in call_leaves(snapshot.args, snapshot.kwargs) if isinstance(x, Tensor)]
    sizes = {x.shape[0] if x.layout is torch.strided and not x.is_nested else 0 for x in tensors if x.ndim}
    return sizes.pop() if len(sizes) == 1 else 0
