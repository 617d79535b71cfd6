"""Cures that are changes of the source: each is compiled and run on the failing batch in its function's place."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from ...instrumentation.wrapped_names import module_names
from ...report.finding import Cure, Finding
from ...util.visible import spell
from ..batch_snapshot import BatchSnapshot
from ..diagnosis import Diagnosis
from ..experiment import NO_CONDITIONS, Conditions, Experiment, run
from .code_swap import Probe, TargetFinder, exchanged, find_target
from .effects import Against, Tried, against, effect_of, evaluated, kept
from .guards import Facts
from .module_options import ModuleOption, SearchResult, try_option
from .rules import at_definitions, changes, failing_node, hiding, later_forms, operation_name
from .site import Change, Site
from .source import Edit, SourceFile, Span
from .written import changed, judged, written_out

# Forwards after a failure, each perhaps of a large model. One finds the operation, and the others are for trials.
MOST_FORWARDS = 8
MOST_RUNS = MOST_FORWARDS - 1
# Trials that are kept for wider formats where a narrow one takes part.
KEPT_FOR_FORMATS = 3
# Changes of the line itself that come before those of the lines above it.
_FIRST = 3
# Changes that are tried on their line alone, beside the line itself.
_MOST_BESIDE = 40
_FORMATS = ("float16", "bfloat16", "float32", "float64")


def try_patches(
    snapshot: BatchSnapshot,
    finding: Finding,
    model: nn.Module,
    diagnosis: Diagnosis,
    *,
    most_runs: int,
    conditions: Conditions = NO_CONDITIONS,
    may_hide: bool = False,
    at: TargetFinder | None = None,
) -> SearchResult:
    """Try an option of the module and changes of the line of the diagnosis on the batch, at most so many forwards.

    The first that works ends the search. With `may_hide` and where none works, a change that only hides the value is
    tried last. `at` finds what runs a line, `find_target` if
    it is None.

    A change works when all that the modules are given and give is finite, every gradient of a backward from the outputs
    (where the batch was run with a graph), and values of the changed expression that were finite stay about the same.
    Raises nothing of its own: what goes wrong is a remark.
    """
    found = SearchResult()
    place, start = diagnosis.place, diagnosis.start
    try:
        name = finding.module if finding.origin == "produced" else finding.source_module
        option = None if name is None else ModuleOption.of(model, name)
        if option is not None:
            try_option(option, snapshot, model, conditions, start, found)
        if found.cures or place is None:
            return found
        target = (
            find_target(place.filename, place.line, place.positions)
            if at is None
            else at(place.filename, place.line)
        )
        if isinstance(target, str):
            found.remarks.append(f"no change of the source was tried: {target}")
            return found
        position = target.file.at(place.positions)
        site = Site(target, place.line, position)
        facts = Facts(
            operation_name(finding.operation or ""),
            _narrowest(finding),
            finding.phase == "backward",
            place.counts,
            place.numbers,
            not any(one.isfinite is False for one in finding.operands),
        )
        is_given = finding.origin in ("data", "buffer")
        search = _Search(snapshot, model, site, conditions, diagnosis, most_runs, is_given, may_hide, found)
        search.go(facts, position)
        if may_hide and not found.cures:
            search.hide(hiding(site, facts, position))
    except Exception as error:
        found.remarks.append(f"the search for a change of the source ended early: {spell(error)}")
    return found


def _narrowest(finding: Finding) -> str:
    names = {one.dtype.removeprefix("torch.") for one in finding.operands}
    return next((name for name in _FORMATS if name in names), "float32")


class _Trial(NamedTuple):
    """A change to try, the statement that shows its effect, the file with the change, and what it is expected to do."""

    change: Change
    site: Site
    after: SourceFile
    expected: Against | None = None
    has_finite_gradient: bool = True

    @property
    def is_promising(self) -> bool:
        """Return whether the line alone has finite values and gradients with the change, and those of float64."""
        return self.expected is not None and self.expected.is_good and self.has_finite_gradient

    def is_better_than(self, moved: int) -> bool:
        """Return whether the change is expected to move fewer of the values that float64 gives."""
        return self.expected is not None and self.has_finite_gradient and self.expected.moved < moved


class _Seen(NamedTuple):
    """A run of the batch: the values at places of the source, and those tried beside them."""

    experiment: Experiment
    probe: Probe


@dataclass
class _Search:
    """Trials of changes at `_site`. Those that work go to `_found`."""

    _snapshot: BatchSnapshot
    _model: nn.Module
    _site: Site
    _conditions: Conditions
    _diagnosis: Diagnosis
    _most_runs: int
    _is_given: bool
    _may_hide: bool
    _found: SearchResult
    _before: dict[Span, list[list[Tensor]]] = field(default_factory=dict)
    # What float64 gives for the line as it is, with what it gave, and where that stands, by statement.
    _truth: dict[Site, tuple[list[list[Tensor]], list[list[Tensor]]]] = field(default_factory=dict)
    _judged: dict[Site, ast.expr] = field(default_factory=dict)
    _failing: ast.AST | None = None

    def go(self, facts: Facts, position: Span | None) -> None:
        """Try the changes until one works that leaves what float64 gives; else keep the one that moves the least.

        A remark names those that were not enough, where none is.
        """
        trials = self._proposed(facts, position)
        if not trials:
            return
        tried: list[str] = []
        too_large = ""
        best: tuple[int, Cure] | None = None
        for trial in sorted(self._expected(trials), key=lambda one: not one.is_promising):
            if self._found.runs >= self._most_runs - self._may_hide:
                break
            if best is not None and not trial.is_better_than(best[0]):
                continue
            tried.append(_written(trial.change))
            seen = self._run(trial.after, self._looks(trial))
            if not self._is_finite(seen):
                continue
            effect, is_small, moved = self._effect(trial, seen.probe)
            if not is_small:
                too_large = too_large or f"; with {tried[-1]} the batch is finite, but that {effect}"
                continue
            if best is None or moved < best[0]:
                best = moved, self._cure(trial.change, trial.after, effect)
            if not moved:
                break
        if best is not None:
            self._found.cures.append(best[1])
        elif tried:
            text = (
                f"these changes of the source were tried, and none was enough: {', '.join(tried)}{too_large}"
            )
            self._found.remarks.append(text)

    def hide(self, change: Change | None) -> None:
        """Try the change, and keep it as what it is: it hides the value, and what made it stays."""
        after = None if change is None else self._after(change)
        if change is not None and after is not None and self._is_finite(self._run(after, [])):
            self._found.cures.append(Cure(self._words(change), False, hides=True))

    def _proposed(self, facts: Facts, position: Span | None) -> list[_Trial]:
        """Return the changes of the line and of those that define the names in it, in the order of the trials."""
        own = list(changes(self._site, facts, position))
        made = list(at_definitions(self._site, facts, position))
        around = [
            list(changes(Site(self._site.target, line), facts._replace(operation="", counts=frozenset())))
            for line in self._site.definitions()
        ]
        nearest = [one for few in around for one in few[:1]]
        others = [one for few in around for one in few[1:]]
        ordered = [*own[:_FIRST], *made[:1], *nearest, *own[_FIRST:], *made[1:], *others]
        pairs = [(one, self._site) for one in ordered]
        stable = sum(one.is_stable for one in own[:_FIRST])
        pairs[stable:stable] = [(one, site) for site, one in later_forms(self._site, facts, position)]
        self._failing = failing_node(self._site, facts, position)
        known: dict[tuple[Edit, ...], _Trial] = {}
        for change, site in pairs:
            if change.edits not in known and (after := self._after(change)) is not None:
                known[change.edits] = _Trial(change, site, after)
        return list(known.values())

    def _after(self, change: Change) -> SourceFile | None:
        try:
            return self._site.file.edited(change.edits)
        except SyntaxError:
            return None

    def _expected(self, trials: Sequence[_Trial]) -> list[_Trial]:
        """Run the batch as it is once, with each change of a line tried on that line alone."""
        for site in {one.site for one in trials}:
            node = judged(site, self._failing if site is self._site else None)
            if node is not None:
                self._judged[site] = node
        others: dict[int, list[ast.expr]] = {}
        places: list[Span] = []
        tried: dict[Site, list[_Trial]] = {}
        for site, node in self._judged.items():
            beside = [written_out(site, node)]
            tried[site] = []
            for one in trials:
                is_here = one.site is site and len(beside) <= _MOST_BESIDE
                if is_here and (new := changed(site, node, one.change, one.after)) is not None:
                    beside.append(new)
                    tried[site].append(one)
            others[len(places)] = beside
            places.append(site.file.span(node))
        spans = list(dict.fromkeys(span for one in trials for span in one.change.looks))
        # This run computes nan again. The model's own check may end it by an exception.
        seen = self._run(self._site.file, [*places, *spans], others)
        self._before = {span: seen.probe.values.get(i, []) for i, span in enumerate(spans, len(places))}
        expected: dict[tuple[Edit, ...], _Trial] = {}
        for number, (site, few) in enumerate(tried.items()):
            runs: list[list[Tried]] = seen.probe.tried.get(number, [])
            truth = [one[0].values for one in runs]
            before = seen.probe.values.get(number, [])
            self._truth[site] = truth, before
            for i, one in enumerate(few, 1):
                found = against(truth, before, [results[i].values for results in runs])
                is_finite = all(results[i].has_finite_gradient for results in runs)
                expected[one.change.edits] = one._replace(expected=found, has_finite_gradient=is_finite)
        return [expected.get(one.change.edits, one) for one in trials]

    def _looks(self, trial: _Trial) -> list[Span]:
        """Return where to look in the changed file: at the changed expressions, then at the line's own value."""
        node = self._judged.get(trial.site)
        spans = [*trial.change.looks, *(() if node is None else (trial.site.file.span(node),))]
        return [trial.site.file.moved(span, trial.change.edits) for span in spans]

    def _is_finite(self, seen: _Seen) -> bool:
        experiment, probe = seen
        # Bad data stays bad: then the modules' outputs and the gradients have to be finite.
        bad = [
            label for _, label in experiment.nonfinite() if label.startswith("output") or not self._is_given
        ]
        if self._diagnosis.is_unseen:
            # Only the changed expression itself shows whether the value is gone.
            made = (x for values in probe.values.values() for few in values for x in few)
            bad += ["" for x in made if not x.isfinite().all()]
        return experiment.error is None and probe.was_run and not bad and not experiment.bad_gradients

    def _effect(self, trial: _Trial, probe: Probe) -> tuple[str, bool, int]:
        """Return the effect in words, whether it is small enough, and how many values of float64 it moves."""
        looks = trial.change.looks
        pairs = [
            (old, new)
            for i, span in enumerate(looks)
            for old_values, new_values in zip(self._before[span], probe.values.get(i, []), strict=False)
            for old, new in zip(old_values, new_values, strict=False)
        ]
        effect, is_small = effect_of(pairs)
        found = against(*self._truth.get(trial.site, ([], [])), probe.values.get(len(looks), []))
        if found is None:
            return effect, is_small, 0
        # What rounding has spoilt is no measure.
        is_right = bool(found.total) and found.is_close and trial.change.is_stable
        return f"{effect}; {found}", is_small or is_right, found.moved

    def _cure(self, change: Change, after: SourceFile, effect: str) -> Cure:
        file = self._site.file
        line = file.line_of(change.edits[0].span)
        old, new = ("; ".join(one.part(one.span(x)) for x in one.statements(line)) for one in (file, after))
        patch = file.patch(after)
        code = "" if patch or new == old else new
        return Cure(self._words(change), True, None, patch, effect, code)

    def _words(self, change: Change) -> str:
        file = self._site.file
        where = f"{Path(file.name).name}:{file.line_of(change.edits[0].span)}"
        replaced = " and ".join(f"`{file.part(one.span)}`" for one in change.edits)
        return " ".join(f"{change.words}: write {_written(change)} for {replaced} at {where}".split())

    def _run(
        self,
        file: SourceFile,
        looks: Sequence[Span],
        others: Mapping[int, Sequence[ast.expr]] = MappingProxyType({}),
    ) -> _Seen:
        self._found.runs += 1
        probe = Probe(kept, others, evaluated)
        with exchanged(self._site.target, file, looks, probe):
            snapshot, names, start = self._snapshot, module_names(self._model), self._diagnosis.start
            allows = self._conditions.allows
            return _Seen(run(snapshot, names, allows=allows, backward=snapshot.grad, start=start), probe)


def _written(change: Change) -> str:
    return " and ".join(f"`{one.text}`" for one in change.edits)
