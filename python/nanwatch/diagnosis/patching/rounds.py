"""Cures that are changes of the source, found in rounds.

A round finds the operation that fails first, tries the proposals for it, and runs the whole batch with each. Where a
change moves the failure on to a later operation, the change stays and the next round begins there.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from ...instrumentation.wrapped_names import module_names
from ...report.finding import Cure, Finding
from ...util.visible import spell
from ..batch_snapshot import BatchSnapshot
from ..diagnosis import Diagnosis, Expression
from ..experiment import NO_CONDITIONS, Conditions, Experiment, run
from ..float64 import agreement, moved, results_in_float64
from .code_swap import Probe, TargetFinder, exchanged, find_target, node_in
from .matching import Site
from .module_options import ModuleOption, SearchResult, try_option
from .proposals import Failure, Proposal, Proposer, failing_nodes, narrowest, operands
from .source import SourceFile, Span, Target
from .table import operation_name

_MOST_ROUNDS = 4
# Runs of the batch, each perhaps of a large model, and seconds for all of them.
_MOST_RUNS = 24
_MOST_SECONDS = 25.0


class Program(NamedTuple):
    """The source of the program with the changes that are kept: files and functions, by name.

    `shifts` has, for each file, where lines were added, and how many.
    """

    files: Mapping[str, SourceFile] = {}
    targets: tuple[Target, ...] = ()
    shifts: Mapping[str, tuple[tuple[int, int], ...]] = {}
    words: tuple[str, ...] = ()

    def first_line(self, filename: str, line: int) -> int:
        """Return the line of the file on the disk that has become this one."""
        for start, added in reversed(self.shifts.get(filename, ())):
            if line > start:
                line = max(start, line - added)
        return line

    def edited(self, site: Site, proposal: Proposal) -> Program:
        """Return the program with one change more. Raises SyntaxError."""
        name, file = site.file.name, site.file
        shifts, offset = list(self.shifts.get(name, ())), 0
        for edit in sorted(proposal.edits):
            added = edit.text.count("\n") - file.part(edit.span).count("\n")
            if added:
                shifts.append((file.line_of(edit.span) + offset, added))
                offset += added
        targets = self.targets if site.target in self.targets else (*self.targets, site.target)
        return Program(
            {**self.files, name: file.edited(proposal.edits)},
            targets,
            {**self.shifts, name: tuple(shifts)},
            (*self.words, _words(file, proposal)),
        )

    @contextmanager
    def running(
        self, probe: Probe, target: Target | None = None, looks: Sequence[Span] = ()
    ) -> Iterator[None]:
        """Let the calls of this thread run this source for the block, and look at places of one function."""
        with ExitStack() as stack:
            others = () if target is None or target in self.targets else (target,)
            for each in (*self.targets, *others):
                file = self.files.get(each.file.name, each.file)
                stack.enter_context(exchanged(each, file, looks if each is target else (), probe))
            yield


def _words(file: SourceFile, proposal: Proposal) -> str:
    edit = proposal.edits[-1]
    line, old = file.line_of(edit.span), " ".join(file.part(edit.span).split())
    return f"{proposal.words}: write `{edit.text}` for `{old}` at {Path(file.name).name}:{line}"


def try_patches(
    snapshot: BatchSnapshot,
    finding: Finding,
    model: nn.Module,
    diagnosis: Diagnosis,
    *,
    conditions: Conditions = NO_CONDITIONS,
    at: TargetFinder = find_target,
) -> SearchResult:
    """Try an option of the guilty module, then changes of the source; the first that works ends the search.

    `at` finds the function that runs a line. A change works when all that the modules are given and give is finite, and
    every gradient of a backward from the outputs (where the batch was run with a graph), and when the results are near
    those of float64, where these are finite. Raises nothing of its own: what goes wrong is a remark.
    """
    result = SearchResult()
    try:
        name = finding.module if finding.origin == "produced" else finding.source_module
        option = None if name is None else ModuleOption.of(model, name)
        if option is not None:
            try_option(option, snapshot, model, conditions, diagnosis.start, result)
        if not result.cures and diagnosis.place is not None:
            _Rounds(snapshot, finding, model, diagnosis, conditions, at, result).go(diagnosis.place)
    except Exception as error:
        result.remarks.append(f"the search for a change of the source ended early: {spell(error)}")
    return result


@dataclass
class _Rounds:
    """The rounds for one finding. A patch that works goes to `result`."""

    snapshot: BatchSnapshot
    finding: Finding
    model: nn.Module
    diagnosis: Diagnosis
    conditions: Conditions
    at: TargetFinder
    result: SearchResult
    began: float = field(default_factory=time.monotonic)
    tried: list[str] = field(default_factory=list)
    too_far: str = ""
    truth: list[Tensor] | None = None

    def go(self, place: Expression) -> None:
        """Make the rounds."""
        finding = self.finding
        failure: Failure | None = Failure(
            operation_name(finding.operation or ""),
            place,
            narrowest([record.dtype for record in finding.operands]),
            finding.phase == "backward",
            not any(record.isfinite is False for record in finding.operands),
        )
        program = Program()
        for number in range(_MOST_ROUNDS):
            if failure is None:
                break
            site = self._site(program, failure)
            if isinstance(site, str):
                if number == 0:
                    self.result.remarks.append(f"no change of the source was tried: {site}")
                    return
                break
            program, failure = self._round(number, program, site, failure)
            if self.result.cures:
                return
        if self.tried:
            names = ", ".join(dict.fromkeys(self.tried))
            self.result.remarks.append(
                f"these changes of the source were tried, and none was enough: {names}{self.too_far}"
            )

    def _site(self, program: Program, failure: Failure) -> Site | str:
        """Return the function that runs the failing line, in the source as it is by now."""
        place = failure.place
        line = program.first_line(place.filename, place.line)
        is_same = line == place.line and place.filename not in program.files
        target = self.at(place.filename, line, place.positions if is_same else None)
        if isinstance(target, str):
            return target
        known = (each for each in program.targets if _is_same(each, target))
        target = next(known, target)
        file = program.files.get(target.file.name, target.file)
        try:
            return Site(target, file, node_in(target, file.tree))
        except ValueError as error:
            return str(error)

    def _round(
        self, number: int, program: Program, site: Site, failure: Failure
    ) -> tuple[Program, Failure | None]:
        """Try the proposals for the failure. Return the program and the failure that the next round begins with."""
        failing = failing_nodes(site, failure)
        inside: tuple[Program, Failure | None] | None = None
        values = self._values(number, program, site, [*operands(site, failing), *failing])
        for proposal in Proposer(site, failure, failing, values).proposals():
            if self.result.runs >= _MOST_RUNS or time.monotonic() - self.began > _MOST_SECONDS:
                break
            try:
                trial = program.edited(site, proposal)
                changed = _changed(site.file, proposal)
                experiment, probe = self._run(trial, site.target, changed)
            except (SyntaxError, ValueError):
                continue
            self.tried.append(f"`{proposal.edits[-1].text}`")
            if experiment.error is not None or not probe.was_run:
                continue
            if self._is_finite(experiment, probe):
                close = agreement(experiment.results, self.truth)
                if close.is_close:
                    away = moved(probe.values.get(0, []), values.get(proposal.node, []))
                    self.result.cures.append(self._cure(trial, "; ".join(filter(None, [close.words, away]))))
                    return trial, None
                self.too_far = (
                    self.too_far or f"; with {self.tried[-1]} the batch is finite, but {close.words}"
                )
            later = self._later(experiment, failure)
            if later is None:
                continue
            spans = [
                changed,
                *(site.file.moved(site.file.span(node), proposal.edits) for node in failing[:1]),
            ]
            file = trial.files[site.file.name]
            position = file.at(later.place.positions) if later.place.filename == file.name else None
            if position is None or not any(span.covers(position) for span in spans):
                return trial, later
            # Behind the operation that failed lies another one of the same expression, in the backward.
            if later.is_backward and not failure.is_backward and later.operation != failure.operation:
                inside = inside or (trial, later)
        return inside or (program, None)

    def _values(
        self, number: int, program: Program, site: Site, nodes: Sequence[ast.AST]
    ) -> dict[ast.AST, list[Tensor]]:
        """Run the batch in float64. Return the values of these nodes; the results of the first round are the truth."""
        probe = Probe()
        unique = [node for node in dict.fromkeys(nodes) if hasattr(node, "lineno")]
        spans = [site.file.span(node) for node in unique]
        self.result.runs += 1
        results = results_in_float64(self.snapshot, lambda: program.running(probe, site.target, spans))
        if number == 0:
            self.truth = results
        return {node: probe.values.get(i, []) for i, node in enumerate(unique)}

    def _run(self, program: Program, target: Target, look: Span) -> tuple[Experiment, Probe]:
        self.result.runs += 1
        probe = Probe()
        with program.running(probe, target, [look]):
            experiment = run(
                self.snapshot,
                module_names(self.model),
                allows=self.conditions.allows,
                backward=self.snapshot.grad,
                start=self.diagnosis.start,
                follows=True,
            )
        return experiment, probe

    def _is_finite(self, experiment: Experiment, probe: Probe) -> bool:
        # Bad data stays bad: then the modules' outputs and the gradients have to be finite.
        is_given = self.finding.origin in ("data", "buffer")
        bad = [label for _, label in experiment.nonfinite() if label.startswith("output") or not is_given]
        # Only the changed expression itself shows whether a value that no output has is gone.
        seen = [x for values in probe.values.values() for x in values] if self.diagnosis.is_unseen else []
        return not bad and not experiment.bad_gradients and all(bool(x.isfinite().all()) for x in seen)

    @staticmethod
    def _later(experiment: Experiment, failure: Failure) -> Failure | None:
        """Return the failure of a trial, where it is no earlier one than the failure that the trial was for."""
        step = experiment.failure
        if step is None or step.place is None or (failure.is_backward and not experiment.failed_in_backward):
            return None
        return Failure(
            operation_name(step.operation),
            step.place,
            narrowest([record.dtype for record in step.operands]),
            experiment.failed_in_backward,
            not any(record.isfinite is False for record in step.operands),
        )

    def _cure(self, program: Program, effect: str) -> Cure:
        patches = [
            target.file.patch(program.files[target.file.name]) for target in _first_of_files(program.targets)
        ]
        code = ""
        if not any(patches):  # a cell of a notebook
            target = program.targets[0]
            file = program.files[target.file.name]
            lines = zip(target.file.text.splitlines(), file.text.splitlines(), strict=False)
            code = next((new.strip() for old, new in lines if old != new), "")
        return Cure("; and ".join(program.words), True, None, "".join(patches), effect, code)


def _changed(file: SourceFile, proposal: Proposal) -> Span:
    """Return the span of the changed expression in the edited file."""
    span, edit = file.span(proposal.node), proposal.edits[-1].span
    return file.moved(span if span.covers(edit) else edit, proposal.edits)


def _first_of_files(targets: Sequence[Target]) -> list[Target]:
    return list({target.file.name: target for target in targets}.values())


def _is_same(left: Target, right: Target) -> bool:
    if left.file.name != right.file.name or (left.exchange is None) != (right.exchange is None):
        return False
    return left.exchange is not None or left.functions == right.functions
