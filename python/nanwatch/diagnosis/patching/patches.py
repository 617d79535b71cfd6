"""Cures that are changes of the source: each is compiled and run on the failing batch in its function's place."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...instrumentation.functions import find_called
from ...instrumentation.wrapped_names import module_names
from ...recording.walk import leaves
from ...report.finding import Cure, Finding
from ...util.visible import spell
from ..batch_snapshot import BatchSnapshot
from ..diagnosis import Diagnosis
from ..experiment import NO_CONDITIONS, BackwardStart, Conditions, Experiment, code_of, in_float64, run
from .code_swap import Probe, TargetFinder, exchanged, find_target, node_of
from .guards import Facts, with_argument
from .rules import at_definitions, changes, hiding, operation_name
from .source import Change, Edit, Site, SourceFile, Span

# Forwards after a failure, each perhaps of a large model. One finds the operation, and the others are for trials.
MOST_FORWARDS = 8
MOST_RUNS = MOST_FORWARDS - 1
# Trials that are kept for wider formats where a narrow one takes part.
KEPT_FOR_FORMATS = 3
# A working change moves the finite values by at most 1 % of their norm. More would make another model.
_MOST_CHANGE = 0.01
# A stable form may move them by 10 %: rounding has spoilt the digits that it replaces, as in 1 - tanh(x)**2 near 1.
_MOST_CHANGE_OF_ROUNDED = 0.1
# A zero may move by 0.02. It needs a limit of its own, because its norm allows no change at all.
_MOST_AT_ZERO = 0.02
# Changes of the line itself that come before those of the lines above it.
_FIRST = 3
# Larger values are not kept for the comparison.
_MOST_ELEMENTS = 1 << 24
_FORMATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(slots=True)
class Found:
    """The cures that work, remarks, and the number of forwards used."""

    cures: list[Cure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    runs: int = 0


def try_patches(
    snapshot: BatchSnapshot,
    finding: Finding,
    model: nn.Module,
    diagnosis: Diagnosis,
    *,
    most_runs: int,
    conditions: Conditions = NO_CONDITIONS,
    may_hide: bool = False,
    at: TargetFinder = find_target,
) -> Found:
    """Try an option of the module and changes of the line of the diagnosis on the batch, at most so many forwards.

    The first that works ends the search. With `may_hide` and where none works, a change that only hides the value is
    tried last. `at` finds what runs a line.

    A change works when all that the modules are given and give is finite, every gradient of a backward from the outputs
    (where the batch was run with a graph), and values of the changed expression that were finite stay about the same.
    Raises nothing of its own: what goes wrong is a remark.
    """
    found = Found()
    place, start = diagnosis.place, diagnosis.start
    try:
        name = finding.module if finding.origin == "produced" else finding.source_module
        option = None if name is None else _Option.of(model, name)
        if option is not None:
            _try_option(option, snapshot, model, conditions, start, found)
        if found.cures or place is None:
            return found
        target = at(place.filename, place.line)
        if isinstance(target, str):
            found.remarks.append(f"no change of the source was tried: {target}")
            return found
        site = Site(target, place.line)
        facts = Facts(
            operation_name(finding.operation or ""),
            _narrowest(finding),
            finding.phase == "backward",
            place.counts,
            place.numbers,
            not any(one.isfinite is False for one in finding.operands),
        )
        is_given = finding.origin in ("data", "buffer")
        search = _Search(snapshot, model, site, conditions, diagnosis, most_runs, is_given, found)
        position = site.file.at(place.positions)
        search.go(facts, position)
        if may_hide and not found.cures:
            search.hide(hiding(site, facts, position))
    except Exception as error:
        found.remarks.append(f"the search for a change of the source ended early: {spell(error)}")
    return found


# Options of PyTorch's own modules that end a failure, each with the value to give and what that does.
_OPTIONS: dict[type[nn.Module], tuple[str, float, str]] = {
    **dict.fromkeys(
        (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase),
        ("eps", 1e-5, "divide by more than 0 where all values are the same"),
    ),
    nn.CosineSimilarity: ("eps", 1e-4, "keep the divisor away from 0"),
    nn.CTCLoss: (
        "zero_infinity",
        True,
        "leave out samples that are shorter than their labels, whose loss is infinite",
    ),
}


class _Option(NamedTuple):
    """An option of the guilty module, the modules that one line makes with it, and that line where it is known."""

    module: str
    name: str
    value: float
    words: str
    modules: tuple[nn.Module, ...]
    file: SourceFile | None = None
    edit: Edit | None = None

    @classmethod
    def of(cls, model: nn.Module, name: str) -> _Option | None:
        """Return the option of the module of this name that may end its failure, None where there is none."""
        found = find_called(model, name)
        if found is None:
            return None
        kind = type(found.module)
        known = next((option for one, option in _OPTIONS.items() if issubclass(kind, one)), None)
        if known is None or (getattr(found.module, known[0]) or 0) >= known[1]:
            return None
        above = name
        while above:
            above = above.rpartition(".")[0]
            around = find_called(model, above)
            made = None if around is None else _construction(type(around.module), kind.__name__)
            if around is not None and made is not None:
                others = (one for one in model.modules() if type(one) is type(around.module))
                same = (one for other in others for one in other.modules() if type(one) is kind)
                edit = _edit_of(*made, kind, known[0], repr(known[1]))
                return cls(name, *known, tuple(dict.fromkeys(same)), made[0], edit)
        return cls(name, *known, (found.module,))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Give the modules the value for the block."""
        before = [getattr(one, self.name) for one in self.modules]
        try:
            for one in self.modules:
                setattr(one, self.name, self.value)
            yield
        finally:
            for one, value in zip(self.modules, before, strict=True):
                setattr(one, self.name, value)

    def cure(self, model: nn.Module, effect: str) -> Cure:
        """Return the change as a cure."""
        if self.file is None or self.edit is None:
            code = f"{code_of(model, self.module)}.{self.name} = {self.value!r}"
            return Cure(f"{self.words}: write `{code}` once the model is made", True, None, "", effect)
        line, old = self.file.line_of(self.edit.span), self.file.part(self.edit.span)
        where = f"{Path(self.file.name).name}:{line}"
        what = f"{self.words}: write `{self.edit.text}` for `{old}` at {where}"
        return Cure(what, True, None, self.file.patch(self.file.edited([self.edit])), effect)


def _construction(kind: type[nn.Module], name: str) -> tuple[SourceFile, ast.Call] | None:
    """Return the only call of this name in the constructor of a class."""
    code = getattr(kind.__init__, "__code__", None)
    file = None if code is None else SourceFile.load(code.co_filename)
    if code is None or file is None or (node := node_of(file.tree, code)) is None:
        return None
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    calls = [one for one in calls if ast.unparse(one.func).rpartition(".")[2] == name]
    return (file, calls[0]) if len(calls) == 1 else None


def _edit_of(file: SourceFile, call: ast.Call, kind: type[nn.Module], option: str, value: str) -> Edit:
    position = list(signature(kind).parameters).index(option)
    given = [one for one in call.keywords if one.arg == option]
    if given or position < len(call.args):
        return Edit(file.span(given[0].value if given else call.args[position]), value)
    span = file.span(call)
    return Edit(span, with_argument(file.part(span), f"{option}={value}"))


def _try_option(
    option: _Option,
    snapshot: BatchSnapshot,
    model: nn.Module,
    conditions: Conditions,
    start: BackwardStart | None,
    found: Found,
) -> None:
    """Run the batch with the option and without, and keep it as a cure if it works."""
    runs = []
    for hold in (option.hold, nullcontext):
        found.runs += 1
        with hold():
            runs.append(
                run(
                    snapshot,
                    module_names(model),
                    keep=(option.module, "output"),
                    allows=conditions.allows,
                    backward=snapshot.grad,
                    start=start,
                )
            )
        if runs[0].error is not None or any(runs[0].nonfinite()) or runs[0].bad_gradients:
            return
    effect, is_small = effect_of(list(zip(runs[1].kept, runs[0].kept, strict=False)))
    if is_small:
        found.cures.append(option.cure(model, effect))


def _narrowest(finding: Finding) -> str:
    names = {one.dtype.removeprefix("torch.") for one in finding.operands}
    return next((name for name in _FORMATS if name in names), "float32")


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
    _found: Found
    _before: dict[Span, list[list[Tensor]]] = field(default_factory=dict)

    def go(self, facts: Facts, position: Span | None) -> None:
        """Try the changes in order until one works. A remark names those that were not enough, where none does."""
        proposed = self._proposed(facts, position)
        tried: list[str] = []
        too_large = ""
        for change in proposed:
            # One run is kept for the comparison.
            if self._found.runs >= self._most_runs - 1:
                break
            after = self._after(change)
            if after is None:
                continue
            tried.append(_written(change))
            looks = [self._site.file.moved(span, change.edits) for span in change.looks]
            probe = Probe(_kept)
            if not self._runs_finite(after, looks, probe):
                continue
            effect, is_small = self._effect(change, probe, proposed)
            if is_small:
                self._found.cures.append(self._cure(change, after, effect))
                return
            too_large = too_large or f"; with {tried[-1]} the batch is finite, but that {effect}"
        if tried:
            text = (
                f"these changes of the source were tried, and none was enough: {', '.join(tried)}{too_large}"
            )
            self._found.remarks.append(text)

    def hide(self, change: Change | None) -> None:
        """Try the change, and keep it as what it is: it hides the value, and what made it stays."""
        after = None if change is None else self._after(change)
        if change is None or after is None or not self._runs_finite(after, (), Probe(_kept)):
            return
        self._found.cures.append(Cure(self._words(change), False, hides=True))

    def _proposed(self, facts: Facts, position: Span | None) -> list[Change]:
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
        return list({change.edits: change for change in reversed(ordered)}.values())[::-1]

    def _after(self, change: Change) -> SourceFile | None:
        try:
            return self._site.file.edited(change.edits)
        except SyntaxError:
            return None

    def _runs_finite(self, after: SourceFile, looks: Sequence[Span], probe: Probe) -> bool:
        experiment = self._run(exchanged(self._site.target, after, looks, probe))
        # Bad data stays bad: then the modules' outputs and the gradients have to be finite.
        bad = [
            label for _, label in experiment.nonfinite() if label.startswith("output") or not self._is_given
        ]
        if self._diagnosis.is_unseen:
            # Only the changed expression itself shows whether the value is gone.
            made = (x for seen in probe.values.values() for few in seen for x in few)
            bad += ["" for x in made if not x.isfinite().all()]
        return experiment.error is None and probe.was_run and not bad and not experiment.bad_gradients

    def _effect(self, change: Change, probe: Probe, proposed: Sequence[Change]) -> tuple[str, bool]:
        if not self._before:
            spans = list(dict.fromkeys(span for one in proposed for span in one.looks))
            unchanged = Probe(_kept)
            # This run computes nan again. The model's own check may end it by an exception.
            self._run(exchanged(self._site.target, self._site.file, spans, unchanged))
            self._before = {span: unchanged.values.get(i, []) for i, span in enumerate(spans)}
        pairs = [
            (old, new)
            for i, span in enumerate(change.looks)
            for old_values, new_values in zip(self._before[span], probe.values.get(i, []), strict=False)
            for old, new in zip(old_values, new_values, strict=False)
        ]
        return effect_of(pairs, _MOST_CHANGE_OF_ROUNDED if change.is_stable else _MOST_CHANGE)

    def _cure(self, change: Change, after: SourceFile, effect: str) -> Cure:
        file = self._site.file
        line = file.line_of(change.edits[0].span)
        old, new = (_statement(one, line) for one in (file, after))
        patch = file.patch(after)
        code = "" if patch or new == old else new
        return Cure(self._words(change), True, None, patch, effect, code)

    def _words(self, change: Change) -> str:
        file = self._site.file
        where = f"{Path(file.name).name}:{file.line_of(change.edits[0].span)}"
        replaced = " and ".join(f"`{file.part(one.span)}`" for one in change.edits)
        return " ".join(f"{change.words}: write {_written(change)} for {replaced} at {where}".split())

    def _run(self, hold: AbstractContextManager[Any]) -> Experiment:
        self._found.runs += 1
        with hold:
            snapshot, names, start = self._snapshot, module_names(self._model), self._diagnosis.start
            return run(snapshot, names, allows=self._conditions.allows, backward=snapshot.grad, start=start)


def _written(change: Change) -> str:
    return " and ".join(f"`{one.text}`" for one in change.edits)


def _statement(file: SourceFile, line: int) -> str:
    node = file.statement(line)
    return "" if node is None else file.part(file.span(node))


def _kept(value: Any) -> list[Tensor]:
    found = [x for _, x in leaves(value, "")] if not isinstance(value, Tensor) else [value]
    return [x.detach().clone() for x in found if isinstance(x, Tensor) and x.numel() <= _MOST_ELEMENTS]


def effect_of(pairs: Sequence[tuple[Tensor, Tensor]], most_change: float = _MOST_CHANGE) -> tuple[str, bool]:
    """Say in words what has changed between old and new values, and whether finite ones are about the same."""
    total = changed = healthy = 0
    largest = most = at_zero = difference = norm = 0.0
    for old, new in pairs:
        if old.shape != new.shape:
            return f"gives a tensor of shape {list(new.shape)} for {list(old.shape)}", False
        if old.dtype != new.dtype:
            return f"gives {new.dtype} for {old.dtype}", False
        old, new = in_float64(old, new)
        finite = torch.isfinite(old)
        total += old.numel()
        changed += int((old != new).sum())
        a, b = old[finite], new[finite]
        moved = (a - b).abs()
        healthy += int((moved != 0).sum())
        if moved.numel():
            is_zero = a == 0
            largest, most = max(largest, float(moved.max())), max(most, float(a.abs().max()))
            at_zero = max(at_zero, float(moved[is_zero].max()) if is_zero.any() else 0.0)
            difference += float(moved[~is_zero].square().sum())
            norm += float(a.abs().square().sum())
    is_small = difference <= most_change**2 * norm and at_zero <= _MOST_AT_ZERO
    if not total:
        return "", True
    if not changed:
        return f"leaves all {total:,} elements bit-equal", True
    if not healthy:
        others = "" if changed == total else ", the others bit-equal"
        return f"changes {changed:,} of {total:,} elements{others}", is_small
    size = f"finite ones by at most {largest:.1e}, of values up to {most:.1e}"
    return f"changes {changed:,} of {total:,} elements, {size}", is_small
