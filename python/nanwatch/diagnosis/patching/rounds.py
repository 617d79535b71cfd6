"""Cures that are changes of the source, found in rounds.

A round finds the operation that fails first, and runs the whole batch with each row of the table that applies to it,
the smallest change first. Where a change moves the failure on to a later operation, the change stays and the next round
begins there.
"""

from __future__ import annotations

import ast
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...report.finding import Cure
from ..causes import DOMAINS
from ..experiment import MOST_BY_GUARD, Trials
from ..provenance import Expression, Step
from .matching import Binding, Operation, Site, match, operation_of, placed, written
from .source import Edit, Probe, SourceFile, Span, Target, TargetFinder, exchanged, first_line, moved
from .table import GUARDS, POLES, STABLE, names_that_run, numbers_of, operation_name

_MOST_ROUNDS = 4
STABLE_WORDS = "use the stable form that torch has"
# Runs of the batch, each perhaps of a large model, and seconds for all of them.
_MOST_RUNS = 24
_MOST_SECONDS = 25.0
# Whole words in the name of a value that counts something, without the `s` of a plural, and what counts are computed
# from: `num_tokens` and `n_valid` are counts, `numerator` and `discount` are not.
_COUNTS = re.compile(
    r"(count|cnt|num(ber|el)?|n|len(gth)?|deg(ree)?|size|mask|valid|keep|kept|hot|bincount|eq|ne)s?"
)
# The exponent at which a format ends, the narrowest format first.
_ENDS = {"float16": 11.0, "bfloat16": 88.0, "float32": 88.0, "float64": 709.0}
# Expressions whose value a call of a probe may take the place of.
_VALUES = ast.Name | ast.Attribute | ast.Call | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.IfExp
# The program after a round, and the step that fails next with whether it does so in the backward.
Round = tuple["Program", tuple[Step, bool] | None]


def says_count(text: str) -> bool:
    """Return whether the source of an expression says that its value counts something."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return any(_COUNTS.fullmatch(word.lower()) for word in words) or re.search("==|!=|[<>]", text) is not None


class Proposal(NamedTuple):
    """A change of the source: its edits, the expression that it changes, and in words what it does.

    `masked` are the edits for a mask that leaves no scores beside it in float64 either, as -1e9 does in float32.
    """

    edits: tuple[Edit, ...]
    node: ast.AST
    words: str
    masked: tuple[Edit, ...] = ()


class Proposer:
    """Proposes changes of a site for a step that failed. `look` returns the values of expressions in float64.

    `failing` are the nodes that may be the operation that failed, the likeliest first.
    """

    def __init__(
        self, site: Site, step: Step, look: Callable[[list[ast.AST]], Mapping[ast.AST, list[Any]]]
    ) -> None:
        self._site = site
        self._operation = operation_name(step.operation)
        dtypes = {record.dtype.removeprefix("torch.") for record in step.operands}
        self._dtype = next((name for name in _ENDS if name in dtypes), "float32")
        self._numbers = numbers_of(self._dtype)
        self._known: set[tuple[Edit, ...]] = set()
        self.failing = self._failing_nodes(step)
        # The nodes inside the likeliest one, and inside what made its names.
        inner = [node for top in self.failing[:1] for node in ast.walk(top) if node is not top]
        made = filter(None, map(site.definition, inner))
        parts = [*inner, *(node for value in made for node in ast.walk(value))]
        # The operations that made the operands of the likeliest node, where one of these was not finite.
        is_bad = any(record.isfinite is False for record in step.operands)
        self._sources = [x for x in parts if is_bad and getattr(operation_of(x, site), "name", "") in POLES]
        # Rounding may have made these, as the difference of two large numbers.
        operands = [x for node in self.failing[:1] for x in self._operands_of(node) if not is_bad]
        self._operands = [y for x in operands for y in (x, site.definition(x))]
        # Names that are added, or handed to a function: a product with 1e-8 is computed before it is rounded.
        names = (x for x in parts if isinstance(x, ast.Constant | ast.Name | ast.Attribute))
        added = [x for x in names if isinstance(getattr(site.parents[x], "op", ast.Add()), ast.Add)]
        looked = [x for node in (*self.failing, *self._sources) for x in self._operands_of(node)] + added
        looked = [x for x in looked if isinstance(x, _VALUES) and site.constant(x) is None]
        self.values = look([*self.failing, *looked])
        # Numbers of the source that are not 0, and are 0 in the format of the failing operation, as 1e-8 is in float16.
        kind = getattr(torch, self._dtype)
        numbers = [(x, self._number(x) or 0) for x in added]
        self._vanished = [x for x, number in numbers if number > 0 == float(torch.tensor(number, dtype=kind))]
        self._limits = torch.finfo(kind)

    def _failing_nodes(self, step: Step) -> list[ast.AST]:
        assert step.place is not None
        line, position = step.place.line, self._site.file.at(step.place.positions)
        names = names_that_run(self._operation)
        ranks: dict[ast.AST, tuple[bool, bool, bool]] = {}
        nodes: Iterator[Any] = ast.walk(self._site.node)
        for node in nodes:
            operation = operation_of(node, self._site)
            if operation is None or not node.lineno <= line <= node.end_lineno:
                continue
            span = self._site.file.span(node)
            if span == position or operation.name in names:
                is_outside = position is None or not span.covers(position)
                ranks[node] = operation.name not in names, span != position, is_outside
        inside = [node for node, (_, _, is_outside) in ranks.items() if not is_outside]
        return sorted(inside or ranks, key=ranks.__getitem__)

    def outside(self) -> tuple[str, bool]:
        """Return an operand that float64 too has outside the domain, "" for none, and whether that forbids a clamp.

        A clamp would hide what made the operand, unless rounding did. It is a guard of a power other than a root.
        """
        operation = operation_of(self.failing[0], self._site) if self.failing else None
        if operation is None:
            return "", False
        base, *_, power = (*operation.args, *operation.keywords.values()) * 2
        exponents = [torch.as_tensor(x) for x in (self._number(power), *self.tensors(power)) if x is not None]
        is_power = self._operation == "pow" and any(bool((x != x.round()).any()) for x in exponents)
        is_root = not is_power or 0 < abs(self._number(power) or 0) < 1
        least, largest = DOMAINS.get("sqrt" if is_power else self._operation, (-math.inf, math.inf))
        tensors = [x[x.isfinite()] for x in self.tensors(base) if not x.is_complex()]
        ends = [float(end) for x in tensors if x.numel() for end in x.aminmax()]
        distance, farthest = max(((max(least - end, end - largest), end) for end in ends), default=(0.0, 0.0))
        return (f"{farthest:.3g}", is_root) if distance > MOST_BY_GUARD else ("", False)

    def causes(self) -> list[str]:
        """Return a sentence for each number of the source that is 0 in the format of the failing operation."""
        names = dict.fromkeys(map(self._site.text, self._vanished))
        return [f"`{name}` is 0 in {self._dtype}, so it keeps nothing away from 0" for name in names]

    def proposals(self) -> Iterator[Proposal]:
        """Yield the changes, stable forms before guards, each once."""
        for number in self._vanished:
            form = "EPS" if isinstance(number, ast.Constant) else "max(X, EPS)"
            binding = Binding({"X": number})
            yield from self._written(number, number, form, binding, "give it an eps that the format has")
        yield from self._stable()
        for node in self.failing:
            yield from self._untaken(node)
        is_half = self._dtype == "float16"
        if is_half:
            yield from self._infinities()
            for node in self.failing[:1]:
                x = self._operands_of(node)[0]
                yield from self._written(node, x, "X.float()", Binding({"X": x}), "compute it in float32")
        for node in [*self._sources, *self.failing]:
            for row in GUARDS:
                yield from self.guard(node, row)
        if not is_half:
            yield from self._infinities()

    def _operands_of(self, node: ast.AST) -> list[ast.expr]:
        operation = operation_of(node, self._site)
        return [] if operation is None else [*operation.args, *operation.keywords.values()]

    def _stable(self) -> Iterator[Proposal]:
        site, failing = self._site, {*self.failing[:1], *self._sources, *self._operands}
        nodes = [x for x in ast.walk(site.node) if isinstance(x, ast.expr) and operation_of(x, site)]
        for pattern, form in STABLE:
            for node in nodes:
                binding = match(site, pattern, node)
                if binding is not None and failing & binding.nodes:
                    yield from self._written(node, node, form, binding, STABLE_WORDS)

    def guard(self, node: ast.AST, row: tuple[str, ...]) -> list[Proposal]:
        """Return the change that a row of guards makes at a node, none where the row is for another case."""
        pattern, part, form, condition, words = row
        binding = match(self._site, pattern, node)
        if binding is None or (condition and not self._holds(condition, binding)):
            return []
        changed = binding.letters[part] if part else node
        zero = re.search(r"(\w) == 0", form)
        varied = [changed] * bool(part) + ([binding.letters[zero[1]]] if zero else [])
        if isinstance(changed, ast.stmt) or any(self._site.constant(x) is not None for x in varied):
            return []
        return self._written(node, changed, form, binding, words)

    def _written(
        self, node: ast.AST, changed: ast.AST, form: str, binding: Binding, words: str
    ) -> list[Proposal]:
        """Return the change that writes a form in the place of a part of the node, none if it is no new one."""
        numbers = {**self._numbers, "BOUND": self._bound(binding)}
        words = re.sub(r"\b[A-Z]{3,}\b", lambda name: numbers.get(name[0], name[0]), words)
        # The bound of an exponent is for all its uses first: without it the rest of a loss pulls the other way.
        users = self._site.same(changed) if isinstance(changed, ast.expr) and "clamp(max=" in form else []
        others = chain(*(written(self._site, user, form, Binding({"X": user}), numbers) for user in users))
        edits = written(self._site, changed, form, binding, numbers)
        proposals = []
        for change in dict.fromkeys(((*others, *edits), edits)):
            if change not in self._known and any(self._site.file.part(span) != text for span, text in change):
                self._known.add(change)
                proposals.append(Proposal(change, node, words))
        return proposals

    def _holds(self, condition: str, binding: Binding) -> bool:
        kind, _, operations = (text.strip() for text in condition.partition("in "))
        failed = self._operation.removesuffix("_forward").removesuffix("2d")
        if operations and failed not in operations.split():
            return False
        if kind in ("", "bound"):
            return not kind or self._bound(binding) != ""
        if kind == "pole":
            power = self._number(binding.letters["P"])
            return power is None or power < 1 or power != int(power)
        operand = binding.letters.get("B") or binding.letters["X"]
        if kind in ("int", "number"):
            return isinstance(self._number(operand), int if kind == "int" else int | float)
        tensors = self.tensors(operand)
        if kind == "zero":
            eps = float(self._numbers["EPS"])
            return not any(bool(((x != 0) & (x.abs() < eps)).any()) for x in tensors)
        made = self._site.defined(operand)
        terms = operation_of(made, self._site) or Operation("", ())
        # A difference has both signs in other batches, unless it is one of a number, as `1 - p`.
        if (kind, terms.name) == ("positive", "sub") and self._site.constant(terms.args[0]) is None:
            return False
        most = 1 if kind == "fraction" else math.inf
        if not tensors or any(x.is_complex() or bool(((x < 0) | (x > most)).any()) for x in tensors):
            return False
        if kind != "count" or any(bool((x != x.round()).any()) for x in tensors):
            return kind != "count"
        texts = map(ast.unparse, (operand, made, self._site.defined(made)))
        return not any(x.is_floating_point() for x in tensors) or any(map(says_count, texts))

    def tensors(self, node: ast.AST) -> list[Tensor]:
        """Return the tensors that an expression is in float64."""
        return [x for x in self.values.get(node, []) if isinstance(x, Tensor)]

    def _number(self, node: ast.expr) -> float | None:
        """Return the number that a node is or was, None where it is none."""
        values = [self._site.constant(node), *self.values.get(node, [])]
        return next((x for x in values if isinstance(x, int | float)), None)

    def _bound(self, binding: Binding) -> str:
        """Return the bound of an exponent that float64 shows: "" where it goes past the end of the format there too."""
        values = self.tensors(binding.letters.get("X", self._site.node))
        if not values or any(x.is_complex() or not bool(x.isfinite().all()) for x in values):
            return ""
        largest = max((float(x.max()) for x in values if x.numel()), default=math.inf)
        return f"{max(0, math.ceil(largest))}" if largest < 0.9 * _ENDS[self._dtype] else ""

    def _untaken(self, node: ast.AST) -> Iterator[Proposal]:
        """Yield changes that give the elements that are not taken a safe operand, or none.

        The gradient of an element that `where` or an index does not take is 0 times what comes of it.
        """
        operation, inner = operation_of(node, self._site), node
        operands = [] if operation is None else [x for x in operation.args if self._site.constant(x) is None]
        for above in self._site.ancestors(node):
            if isinstance(above, ast.Subscript) and above.value is inner and isinstance(node, ast.Call):
                yield from self._indexed(above, node)
                return
            where = match(self._site, "where(C, A, B)", above)
            if where is not None and operation is not None and operands:
                condition, first, second = (where.letters[letter] for letter in "CAB")
                forms = {first: "torch.where(C, X, 1.0)", second: "torch.where(C, 1.0, X)"}
                binding = Binding({"C": condition, "X": operands[-1 if operation.name == "div" else 0]})
                words = "give the branch that `where` does not take a safe operand"
                if inner in forms:
                    yield from self._written(node, binding.letters["X"], forms[inner], binding, words)
                return
            inner = above

    def _indexed(self, whole: ast.Subscript, call: ast.Call) -> list[Proposal]:
        """Return the call of the elements that its index takes: `loss(a[valid], b[valid])` for `loss(a, b)[valid]`."""
        arguments = call.args or [getattr(call.func, "value", call.func)]
        names = [x.id for x in arguments if isinstance(x, ast.Name)]
        if not names or not isinstance(whole.slice, ast.Name):
            return []
        index = whole.slice.id
        text = re.sub(rf"\b({'|'.join(names)})\b", rf"\1[{index}]", self._site.text(call))
        words = f"compute the elements that `{index}` takes, and no others"
        return [Proposal((placed(self._site, whole, text),), whole, words)]

    def _infinities(self) -> Iterator[Proposal]:
        """Propose finite numbers for those that the function writes and the format has as infinite, as in a mask."""
        lowest = self._numbers["LOWEST"]
        for node in ast.walk(self._site.node):
            is_signed = isinstance(self._site.parents.get(node), ast.UnaryOp)  # tried with its sign alone
            value = self._site.constant(node) if isinstance(node, ast.expr) and not is_signed else None
            if not isinstance(value, int | float) or abs(value) <= self._limits.max:
                continue
            # A mask of the wrong sign is found in a softmax.
            for number in [lowest] * (value < 0 or "softmax" in self._operation) + [lowest[1:]] * (value > 0):
                span, exact = self._site.file.span(node), numbers_of("float64")["LOWEST"]
                masked = (Edit(span, exact),) * number.startswith("-")
                words = f"write a number that {self._dtype} holds"
                yield Proposal((Edit(span, number),), node, words, masked)


class Program(NamedTuple):
    """The source of the program with the changes that are kept: files by name, and the functions that were changed."""

    files: Mapping[str, SourceFile] = {}
    targets: tuple[Target, ...] = ()
    words: tuple[str, ...] = ()

    def edited(self, site: Site, proposal: Proposal) -> Program:
        """Return the program with one change more. Raises SyntaxError."""
        file, edit = site.file, proposal.edits[-1]
        named = [x.text.strip() for x in proposal.edits[:-1] if x.span.start == x.span.end]
        old, new = (" ".join(x.split()) for x in (file.part(edit.span), "; ".join([*named, edit.text])))
        words = f"{proposal.words}: write `{new}` for `{old}` at "
        words += f"{Path(file.name).name}:{file.line_of(edit.span)}"
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
        lines = chain(
            *(zip(x.text.splitlines(), y.text.splitlines(), strict=False) for x, y in pairs.values())
        )
        # Only the cell of a notebook has no patch.
        code = "" if patch else next((new.strip() for old, new in lines if old != new), "")
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
                if not self._tried:
                    remarks.append(f"no change of the source was tried: {target}")
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
        inside: Round = program, None
        proposer = Proposer(site, step, partial(self._in_float64, program, site))
        self._trials.remarks += proposer.causes()
        outside, is_far = proposer.outside()
        for proposal in proposer.proposals():
            if self._trials.runs >= _MOST_RUNS or time.monotonic() > self._end:
                break
            edits, node = proposal.edits, site.file.span(proposal.node)
            changed, probe = moved(node if node.covers(edits[-1].span) else edits[-1].span, edits), Probe()
            try:
                trial = program.edited(site, proposal)
                hold = partial(trial.running, probe, site.target, [changed])
                experiment = self._trials.run(hold, follows=True)
            except (SyntaxError, ValueError):
                continue
            new, _, old = trial.words[-1].partition(": write ")[2].rpartition(" for `")
            self._tried.setdefault(f"`{old}", []).append(new)
            if experiment.error is not None or 0 not in probe.values:
                continue
            values = [x for x in probe.values[0] if isinstance(x, Tensor)]
            works, effect = self._trials.judge(experiment, values, proposer.tensors(proposal.node))
            if effect and not works and proposal.masked:
                masked = program.edited(site, proposal._replace(edits=proposal.masked))
                truth = self._trials.in_float64(partial(masked.running, Probe(), site.target, ()))
                works, words = self._trials.judge(experiment, truth=truth)
                if works:  # other formats are judged by it too
                    effect, self._trials.exact = f"beside a mask that leaves no scores it {words}", truth
            guarded = outside if ".clamp(" in edits[-1].text else ""
            hidden = f"float64 too has {guarded} there" if guarded and is_far else ""
            # A stable form has the gradients that are meant.
            if works and not hidden and proposal.words != STABLE_WORDS:
                hidden = self._trials.explosion(hold)
            if works and not hidden:
                effect += f"; a guard: it moves {guarded}, which float64 has there too" if guarded else ""
                self._trials.cures.append(trial.cure(effect))
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
                return trial, (later, is_later_backward)
            # Behind the operation that failed lies another one of the same expression, in the backward.
            is_other = operation_name(later.operation) != operation_name(step.operation)
            is_behind = is_later_backward and not is_backward and is_other
            # Or the stable form is one of several that the operation needs.
            if (is_behind or proposal.words == STABLE_WORDS) and inside[1] is None:
                inside = trial, (later, True)
        return inside

    def _in_float64(
        self, program: Program, site: Site, nodes: Sequence[ast.AST]
    ) -> Mapping[ast.AST, list[Any]]:
        """Run the batch in float64. Return the values of these nodes."""
        probe, unique = Probe(), list(dict.fromkeys(nodes))
        spans = [site.file.span(node) for node in unique]
        self._trials.in_float64(partial(program.running, probe, site.target, spans))
        return {node: probe.values.get(i, []) for i, node in enumerate(unique)}
