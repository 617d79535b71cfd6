"""Cures that are changes of the source, found in rounds.

A round finds the operation that fails first, and runs the whole batch with each row of the table that applies to it,
the smallest change first. Where a change moves the failure on to a later operation, the change stays and the next round
begins there.
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
from ..data import Samples
from ..experiment import Experiment, Trials
from ..provenance import Expression, Step
from .matching import Site
from .proposer import Proposal, Proposer
from .source import Probe, SourceFile, Span, Target, TargetFinder, exchanged, first_line, moved
from .table import POLES, operation_name

_MOST_ROUNDS = 4
# The inverse of a textbook epsilon, 1e-8, times a value of 100.
_MOST_RESULT = 1e10
# Runs of the batch, each perhaps of a large model, and seconds for all of them.
_MOST_RUNS, _MOST_SECONDS = 24, 25.0
# The program after a round, and the step that fails next with whether it does so in the backward.
Round = tuple["Program", tuple[Step, bool] | None]


class Program(NamedTuple):
    """The source of the program with the changes that are kept: files by name, and the functions that were changed."""

    files: Mapping[str, SourceFile] = {}
    targets: tuple[Target, ...] = ()
    words: tuple[str, ...] = ()

    def edited(self, site: Site, proposal: Proposal) -> Program:
        """Return the program with one change more. Raises SyntaxError."""
        file, (*others, edit) = site.file, proposal.edits
        named = [x.text for x in others if ":=" in x.text]
        old, new = (" ".join(x.split()) for x in (file.part(edit.span), "; ".join([*named, edit.text])))
        place = f"{Path(file.name).name}:{file.line_of(edit.span)}"
        words = f"{proposal.words}: write `{new}` for `{old}` at {place}"
        targets = tuple(dict.fromkeys((*self.targets, site.target)))
        return Program({**self.files, file.name: file.edited(proposal.edits)}, targets, (*self.words, words))

    @contextmanager
    def running(self, probe: Probe, target: Target, looks: Sequence[Span]) -> Iterator[None]:
        """Let the calls of this thread run this source for the block, and look at places of one function."""
        probe.values.clear()
        with ExitStack() as stack:
            for each in dict.fromkeys((*self.targets, target)):
                file = self.files.get(each.file.name, each.file)
                exchange = each.exchange or partial(exchanged, each)
                stack.enter_context(exchange(file, looks if each is target else (), probe))
            yield

    def find(self, place: Expression, at: TargetFinder) -> Target | str:
        """Return the functions that run the code of a place in this source, or why there are none."""
        for target in self.targets:
            if target.file.name == place.filename:
                node = target.node_in(self.files[place.filename].tree)
                if isinstance(node, ast.Module) or first_line(node) <= place.line <= (node.end_lineno or 0):
                    return target
        return at(place)

    def cure(self, effect: str) -> Cure:
        """Return the changes as a cure, whose effect is in words."""
        pairs = {target.file.name: (target.file, self.files[target.file.name]) for target in self.targets}
        patch = "".join(before.patch(after) for before, after in pairs.values())
        texts = ((x.text.splitlines(), y.text.splitlines()) for x, y in pairs.values())
        changed = (new.strip() for x, y in texts for old, new in zip(x, y, strict=False) if old != new)
        # Only the cell of a notebook has no patch.
        code = "" if patch else next(changed, "")
        return Cure("; and ".join(dict.fromkeys(self.words)), True, None, patch, effect, code)


class Rounds:
    """The rounds for the finding of these trials. A patch that works goes to their cures."""

    def __init__(self, trials: Trials, at: TargetFinder) -> None:
        self._trials, self._at, self._end = trials, at, time.monotonic() + _MOST_SECONDS
        self._tried, self._too_far = dict[str, list[str]](), ""

    def go(self, step: Step) -> None:
        """Make the rounds, from the step that failed."""
        remarks, program = self._trials.remarks, Program()
        failure: tuple[Step, bool] | None = step, self._trials.finding.phase == "backward"
        for _ in range(_MOST_ROUNDS):
            if failure is None or failure[0].place is None:
                break
            target = program.find(failure[0].place, self._at)
            if isinstance(target, str):
                remarks += [] if self._tried else [f"no change of the source was tried: {target}"]
                break
            site = Site(target, program.files.get(target.file.name, target.file))
            program, failure = self._round(program, site, *failure)
            if self._trials.cures:
                return
        if self._tried:
            pairs = (f"{' or '.join(dict.fromkeys(new))} for {old}" for old, new in self._tried.items())
            tried = ", ".join(pairs) + self._too_far
            remarks.append(f"these changes of the source were tried, and none was enough: {tried}")

    def _round(self, program: Program, site: Site, step: Step, is_backward: bool) -> Round:
        """Try the proposals for the failure. Return the program and the failure that the next round begins with."""
        trials = self._trials
        inside: Round = program, None
        onward: Round | None = None
        proposer = Proposer(site, step, partial(self._in_float64, program, site))
        trials.remarks += proposer.causes()
        outside, is_far = proposer.outside()
        for proposal in proposer.proposals():
            if trials.runs >= _MOST_RUNS or time.monotonic() > self._end:
                break
            # The forms of one row differ in their number, and with another one what follows may be finite too.
            if onward is not None and proposal.words != onward[0].words[-1].partition(":")[0]:
                break
            edits, node = proposal.edits, site.file.span(proposal.node)
            changed, probe = moved(node if node.covers(edits[-1].span) else edits[-1].span, edits), Probe()
            try:
                trial = program.edited(site, proposal)
                hold = partial(trial.running, probe, site.target, [changed])
                experiment = trials.run(hold, follows=True, judges=True)
            except (SyntaxError, ValueError):
                continue
            new, _, old = trial.words[-1].partition(": write ")[2].rpartition(" for `")
            self._tried.setdefault(f"`{old}", []).append(new)
            if experiment.error is not None or 0 not in probe.values:
                continue
            values = [x for x in probe.values[0] if isinstance(x, Tensor)]
            works, effect = trials.judge(experiment, values, proposer.tensors(proposal.node))
            if effect and not works and proposal.exact:
                exact = program.edited(site, proposal._replace(edits=proposal.exact))
                truth = trials.in_float64(partial(exact.running, Probe(), site.target, ()))
                works, words = trials.judge(experiment, truth=truth)
                is_mask = proposal.exact != edits
                if works:
                    effect = f"beside {'a mask that leaves no scores' if is_mask else 'the same in float64'} it {words}"
                if works and is_mask:  # other formats are judged by it too
                    trials.exact = truth
            guarded = outside if proposal.kind == "guard" else ""
            hidden = f"float64 too has {guarded} there" if guarded and is_far else ""
            # A stable form has the gradients that are meant.
            if works and not hidden and proposal.kind != "stable":
                hidden = self._objection(experiment, values, step) or trials.explosion(hold)
            if works and not hidden:
                effect += f"; a guard: it moves {guarded}, which float64 has there too" if guarded else ""
                trials.cures.append(trial.cure(effect))
                return trial, None
            if effect and not self._too_far:
                self._too_far = f"; with {new} the batch is finite, but {hidden or effect}"
            later, is_later_backward = experiment.failure, experiment.failed_in_backward
            # An earlier failure than before is none to go on from. With strangers it was bad before the batch.
            is_earlier = is_backward and not is_later_backward
            if later is None or later.place is None or later.strangers or is_earlier or hidden:
                continue
            spans = [changed, *(moved(site.file.span(x), edits) for x in proposer.failing[:1])]
            file = trial.files[site.file.name]
            position = file.at(later.place.positions) if later.place.filename == file.name else None
            if position is None or not any(span.covers(position) for span in spans):
                onward = onward or (trial, (later, is_later_backward))
                if proposal.kind != "guard":
                    break
                continue
            # Behind the operation that failed lies another one of the same expression, in the backward.
            is_other = operation_name(later.operation) != operation_name(step.operation)
            is_behind = is_later_backward and not is_backward and is_other
            # Or the stable form is one of several that the operation needs.
            if (is_behind or proposal.kind == "stable") and inside[1] is None:
                inside = trial, (later, True)
        return onward or inside

    def _objection(self, experiment: Experiment, values: Sequence[Tensor], step: Step) -> str:
        """Return in words why a training does not go on with a finite result, where float64 fails; "" for no reason.

        That is too large, or leaves no gradient. A loss of 0 without one is of a batch that has no labels.
        """
        exact = [] if self._trials.exact is None else self._trials.exact.results
        magnitudes = (x[x.isfinite()].abs() for x in experiment.results)  # beside masks
        largest = max((float(x.max()) for x in magnitudes if x.numel()), default=0.0)
        if largest > _MOST_RESULT and not all(bool(x.isfinite().all()) for x in exact):
            return f"the result is {largest:.3g} where float64 fails"
        is_finite = bool(exact) and bool(exact[0].float().isfinite().all())
        is_left_out = not any(bool(x.any()) for x in experiment.results[:1])
        name = operation_name(step.operation)
        is_finite |= name in ("acos", "asin")  # at the ends of their domain
        is_pole = name in POLES - {"div", "reciprocal", "rsqrt"}
        if is_pole and isinstance(self._trials.snapshot.module, Samples):
            return f"what `{name}` of such a sample should be is not known"
        if step.in_backward or is_finite or is_left_out or experiment.untried or not experiment.given:
            return ""
        if not experiment.trains:
            return "all its gradients are 0, so that no step leaves this state"
        # All quotients of a batch of one sample by its deviation are 0.
        is_same = any(x.numel() > 1 and bool((x == x.flatten()[0]).all()) for x in values)
        return "the guard makes all elements the same" if is_pole and is_same else ""

    def _in_float64(
        self, program: Program, site: Site, nodes: Sequence[ast.AST]
    ) -> Mapping[ast.AST, list[Any]]:
        """Run the batch in float64. Return the values of these nodes."""
        probe, unique = Probe(), list(dict.fromkeys(nodes))
        spans = [site.file.span(node) for node in unique]
        self._trials.in_float64(partial(program.running, probe, site.target, spans))
        return {node: probe.values.get(i, []) for i, node in enumerate(unique)}
