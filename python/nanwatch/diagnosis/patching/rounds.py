"""Cures that are changes of the source, found in rounds.

A round finds the operation that fails first, tries the proposals for it, and runs the whole batch with each. Where a
change moves the failure on to a later operation, the change stays and the next round begins there.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...report.finding import Cure
from ..causes import DOMAINS
from ..diagnosis import Expression, Step
from ..experiment import Experiment
from ..trials import MOST_BY_GUARD, Trials
from .code_swap import Probe, TargetFinder, exchanged, node_in
from .matching import Site
from .proposals import Proposal, Proposer, failing_nodes, operands
from .source import SourceFile, Span, Target, first_line
from .table import operation_name

_MOST_ROUNDS = 4
# Runs of the batch, each perhaps of a large model, and seconds for all of them.
_MOST_RUNS = 24
_MOST_SECONDS = 25.0
# The step that failed, and whether its gradient did.
Failure = tuple[Step, bool]
# What expressions are in float64.
Values = Mapping[ast.AST, Sequence[Any]]


class Program(NamedTuple):
    """The source of the program with the changes that are kept: files by name, and the functions that were changed."""

    files: Mapping[str, SourceFile] = {}
    targets: tuple[Target, ...] = ()
    words: tuple[str, ...] = ()

    def edited(self, site: Site, proposal: Proposal) -> Program:
        """Return the program with one change more. Raises SyntaxError."""
        file, edit = site.file, proposal.edits[-1]
        old, new = (" ".join(text.split()) for text in (file.part(edit.span), edit.text))
        place = f"{Path(file.name).name}:{file.line_of(edit.span)}"
        words = f"{proposal.words}: write `{new}` for `{old}` at {place}"
        targets = self.targets if site.target in self.targets else (*self.targets, site.target)
        return Program({**self.files, file.name: file.edited(proposal.edits)}, targets, (*self.words, words))

    @contextmanager
    def running(self, probe: Probe, target: Target, looks: Sequence[Span]) -> Iterator[None]:
        """Let the calls of this thread run this source for the block, and look at places of one function."""
        with ExitStack() as stack:
            for each in dict.fromkeys((*self.targets, target)):
                file = self.files.get(each.file.name, each.file)
                stack.enter_context(exchanged(each, file, looks if each is target else (), probe))
            yield

    def find(self, place: Expression, at: TargetFinder) -> Target | str:
        """Return the functions that run the code of a place in this source, or why there are none."""
        file = self.files.get(place.filename)
        for target in self.targets:
            if file is not None and target.file.name == place.filename:
                node = node_in(target, file.tree)
                if isinstance(node, ast.Module) or first_line(node) <= place.line <= (
                    node.end_lineno or node.lineno
                ):
                    return target
        target_there = at(place)
        if isinstance(target_there, str):
            return target_there
        return next((x for x in self.targets if x.functions == target_there.functions), target_there)


class Rounds:
    """The rounds for the finding of these trials. A patch that works goes to their cures."""

    def __init__(self, trials: Trials, at: TargetFinder) -> None:
        self._trials = trials
        self._at = at
        self._end = time.monotonic() + _MOST_SECONDS
        self._tried: list[str] = []
        self._too_far = ""

    def go(self, step: Step) -> None:
        """Make the rounds, from the step that failed."""
        remarks = self._trials.remarks
        failure: Failure | None = step, self._trials.finding.phase == "backward"
        program = Program()
        for _ in range(_MOST_ROUNDS):
            if failure is None or failure[0].place is None:
                break
            target = program.find(failure[0].place, self._at)
            if isinstance(target, str):
                if not self._tried:
                    remarks.append(f"no change of the source was tried: {target}")
                break
            file = program.files.get(target.file.name, target.file)
            program, failure = self._round(program, Site(target, file, node_in(target, file.tree)), failure)
            if self._trials.cures:
                return
        if self._tried:
            names = ", ".join(dict.fromkeys(self._tried))
            remarks.append(
                f"these changes of the source were tried, and none was enough: {names}{self._too_far}"
            )

    def _round(self, program: Program, site: Site, failure: Failure) -> tuple[Program, Failure | None]:
        """Try the proposals for the failure. Return the program and the failure that the next round begins with."""
        step, is_backward = failure
        failing = failing_nodes(site, step)
        inside: tuple[Program, Failure | None] = program, None
        values = self._values(program, site, [*operands(site, failing), *failing])
        proposer = Proposer(site, step, failing, values)
        self._trials.remarks += proposer.causes()
        for proposal in proposer.proposals():
            if self._trials.runs >= _MOST_RUNS or time.monotonic() > self._end:
                break
            try:
                trial = program.edited(site, proposal)
                changed, probe = _changed(site.file, proposal), Probe()
                hold = partial(trial.running, probe, site.target, [changed])
                experiment = self._trials.run(hold, follows=True)
            except (SyntaxError, ValueError):
                continue
            self._tried.append(f"`{proposal.edits[-1].text}`")
            if experiment.error is not None or 0 not in probe.values:
                continue
            if self._works(experiment, probe, trial, values, proposal, _hidden(site, step, proposal, values)):
                return trial, None
            later, is_later_backward = experiment.failure, experiment.failed_in_backward
            # An earlier failure than before is none to go on from. With strangers it was bad before the batch.
            is_earlier = is_backward and not is_later_backward
            if later is None or later.place is None or later.strangers or is_earlier:
                continue
            spans = [changed, *(site.file.moved(site.file.span(x), proposal.edits) for x in failing[:1])]
            file = trial.files[site.file.name]
            position = file.at(later.place.positions) if later.place.filename == file.name else None
            if position is None or not any(span.covers(position) for span in spans):
                return trial, (later, is_later_backward)
            # Behind the operation that failed lies another one of the same expression, in the backward.
            is_other = operation_name(later.operation) != operation_name(step.operation)
            if is_later_backward and not is_backward and is_other and inside[1] is None:
                inside = trial, (later, True)
        return inside

    def _works(
        self,
        experiment: Experiment,
        probe: Probe,
        trial: Program,
        values: Values,
        proposal: Proposal,
        hidden: str,
    ) -> bool:
        """Judge a trial, and keep a change that works. `hidden` is what a guard would hide."""
        seen = probe.tensors(0)
        if not self._trials.is_finite(experiment):
            return False
        exact = [x for x in values.get(proposal.node, []) if isinstance(x, Tensor)]
        is_close, effect = self._trials.agreement(experiment, seen, exact)
        is_right = is_close and not hidden
        if is_right:
            self._trials.cures.append(_cure(trial, effect))
        elif not self._too_far:
            self._too_far = f"; with {self._tried[-1]} the batch is finite, but {hidden or effect}"
        return is_right

    def _values(self, program: Program, site: Site, nodes: Sequence[ast.AST]) -> Values:
        """Run the batch in float64. Return the values of these nodes."""
        probe = Probe()
        unique = [node for node in dict.fromkeys(nodes) if hasattr(node, "lineno")]
        spans = [site.file.span(node) for node in unique]
        self._trials.in_float64(partial(program.running, probe, site.target, spans))
        return {node: probe.values.get(i, []) for i, node in enumerate(unique)}


def _hidden(site: Site, step: Step, proposal: Proposal, values: Values) -> str:
    """Return in words what a guard would hide: an operand that float64 has outside the operation's domain too."""
    domain, edit = DOMAINS.get(operation_name(step.operation)), proposal.edits[-1]
    if domain is None or ".clamp(" not in edit.text:
        return ""
    operand = [x for node, exact in values.items() if site.file.span(node) == edit.span for x in exact]
    finite = [x[x.isfinite()] for x in operand if isinstance(x, Tensor)]
    ends = [float(end) for x in finite if x.numel() for end in x.aminmax()]
    least, largest = domain[0] - MOST_BY_GUARD, domain[1] + MOST_BY_GUARD
    outside = next((end for end in ends if not least <= end <= largest), None)
    return "" if outside is None else f"float64 too has {outside:.3g} there"


def _changed(file: SourceFile, proposal: Proposal) -> Span:
    """Return the span of the changed expression in the edited file."""
    span, edit = file.span(proposal.node), proposal.edits[-1].span
    return file.moved(span if span.covers(edit) else edit, proposal.edits)


def _cure(program: Program, effect: str) -> Cure:
    files = {target.file.name: target.file for target in program.targets}
    patch = "".join(file.patch(program.files[name]) for name, file in files.items())
    code = ""
    if not patch:  # a cell of a notebook
        ((name, file), *_) = files.items()
        lines = zip(file.text.splitlines(), program.files[name].text.splitlines(), strict=False)
        code = next((new.strip() for old, new in lines if old != new), "")
    return Cure("; and ".join(program.words), True, None, patch, effect, code)
