"""Proposes changes of the source for the operation that failed: the rows of the table that apply to it."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..causes import DOMAINS
from ..experiment import MOST_BY_GUARD
from ..provenance import Step
from .matching import Binding, Site, match, operation_of, placed, written
from .source import Edit
from .table import EPS_WORDS, FORMATS, GUARDS, POLES, STABLE, Row, names_that_run, numbers_of, operation_name

# Whole words in the name of a value that counts something, without the `s` of a plural, and what counts are computed
# from: `num_tokens` and `n_valid` are counts, `numerator` and `discount` are not.
_COUNTS = re.compile(
    r"(count|cnt|num(ber|el)?|n|len(gth)?|deg(ree)?|size|mask|valid|keep|kept|hot|bincount|eq|ne)s?"
)
_WIDER = "compute it in float32"
# Expressions whose value a call of a probe may take the place of.
_VALUES = ast.Name | ast.Attribute | ast.Call | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.IfExp
# An expression, and the edits that change it, the one that gives the change its name last.
Change = tuple[ast.AST, tuple[Edit, ...]]


def says_count(text: str) -> bool:
    """Return whether the source of an expression says that its value counts something."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return any(_COUNTS.fullmatch(word.lower()) for word in words) or re.search("==|!=|[<>]", text) is not None


class Proposal(NamedTuple):
    """A change of the source: its edits, the expression that it changes, and in words what it does.

    A `stable` form has the gradients that are meant, and a `guard` moves the operand that failed. `exact` are edits for
    the run in float64: of a mask that leaves no scores beside it there either, as -1e9 does in float32, or of an eps.
    """

    node: ast.AST
    edits: tuple[Edit, ...]
    words: str
    kind: str = ""
    exact: tuple[Edit, ...] = ()


class Proposer:
    """Proposes changes of a site for a step that failed. `look` returns the values of expressions in float64.

    `failing` are the nodes that may be the operation that failed, the likeliest first.
    """

    def __init__(
        self, site: Site, step: Step, look: Callable[[list[ast.AST]], Mapping[ast.AST, list[Any]]]
    ) -> None:
        self._site, self._operation = site, operation_name(step.operation)
        dtypes = {record.dtype.removeprefix("torch.") for record in step.operands}
        self._dtype = next((name for name in FORMATS if name in dtypes), "float32")
        self._numbers, format_ = numbers_of(self._dtype), getattr(torch, self._dtype)
        self._format = torch.finfo(format_)
        self._known: set[tuple[Edit, ...]] = set()
        self.failing = self._failing_nodes(step)
        top = self.failing[:1]
        # The nodes inside the likeliest one, and inside what made its names.
        inner = [node for x in top for node in ast.walk(x) if node is not x]
        made = filter(None, map(site.definition, inner))
        parts = [*inner, *(node for value in made for node in ast.walk(value))]
        is_bad = any(record.isfinite is False for record in step.operands)
        # Operations that made the operands, where these were not finite. Else rounding may have made the operands.
        self._sources = [x for x in parts if is_bad and self._name(x) in POLES]
        operands = [] if is_bad else [x for node in top for x in self._operands(node)]
        self._causes = {*top, *self._sources, *operands, *map(site.defined, operands)}
        # Operations of its name in the statement, or in one that differs in its names alone, may fail in another batch.
        near = [(x, node) for node in top for y in site.twins(node) for x in ast.walk(y)]
        self._kin = [x for x, node in near if self._name(x) == self._name(node) and not self._is_guarded(x)]
        names = [x for x in parts if isinstance(x, ast.Constant | ast.Name | ast.Attribute)]
        nodes = (*self.failing, *self._sources, *self._kin)
        looked = [*names, *(x for node in nodes for x in self._operands(node))]
        looked += map(site.defined, [x for x in looked if isinstance(x, ast.expr)])
        looked = [x for x in looked if isinstance(x, _VALUES) and site.constant(x) is None]
        self.values = look([*self.failing, *looked])
        # Numbers of the source that the format of the failing operation rounds to 0, as 1e-8 in float16, or to 1. They
        # are added, or handed to a function: a product with 1e-8 is computed before it is rounded.
        sums = [x for x in parts if isinstance(x, ast.BinOp) and site.constant(x) is not None]
        added = [x for x in (*names, *sums) if isinstance(getattr(site.parents[x], "op", ast.Add()), ast.Add)]
        known = {x: number for x in added if (number := self._number(x)) and 0 < number < 1}
        rounded = {x: torch.tensor(number, dtype=format_) for x, number in known.items()}
        self._rounded = {x: int(near) for x, near in rounded.items() if near in (0, 1)}

    def _failing_nodes(self, step: Step) -> list[ast.AST]:
        assert step.place is not None
        file, line, names = self._site.file, step.place.line, names_that_run(self._operation)
        nodes: Iterator[Any] = ast.walk(self._site.node)
        near = [x for x in nodes if self._name(x) is not None and x.lineno <= line <= x.end_lineno]
        position = file.at(step.place.positions)
        ranks = {x: (self._name(x) not in names, file.span(x) != position) for x in near}
        likely = sorted((x for x in near if not all(ranks[x])), key=ranks.__getitem__)
        return [x for x in likely if position is not None and file.span(x).covers(position)] or likely

    def _name(self, node: ast.AST) -> str | None:
        operation = operation_of(node, self._site)
        return None if operation is None else operation.name

    def _operands(self, node: ast.AST) -> list[ast.expr]:
        operation = operation_of(node, self._site)
        return [] if operation is None else [*operation.args, *operation.keywords.values()]

    def _is_guarded(self, node: ast.AST) -> bool:
        """Return whether the program adds a number to an operand, or clamps it."""
        guards = "A + N", "clamp(A, ...)"
        return any(match(self._site, guard, x) for x in self._operands(node) for guard in guards)

    def outside(self) -> tuple[str, bool]:
        """Return an operand that float64 too has outside the domain, "" for none, and whether that forbids a guard.

        A guard would hide what made the operand, unless rounding did. It is a guard of a power other than a root.
        """
        operands = [x for node in self.failing[:1] for x in self._operands(node)]
        if not operands:
            return "", False
        base, power = operands[0], operands[-1]
        exponents = [torch.as_tensor(x) for x in (self._number(power), *self.tensors(power)) if x is not None]
        is_power = self._operation == "pow" and any(bool((x != x.round()).any()) for x in exponents)
        is_root = not is_power or 0 < abs(self._number(power) or 0) < 1
        least, largest = DOMAINS.get("sqrt" if is_power else self._operation, (-math.inf, math.inf))
        tensors = [x[x.isfinite()] for x in self.tensors(base) if not x.is_complex()]
        ends = [float(end) for x in tensors if x.numel() for end in x.aminmax()]
        distance, farthest = max(((max(least - end, end - largest), end) for end in ends), default=(0.0, 0.0))
        most = min(MOST_BY_GUARD, 32 * self._format.eps)  # the rounding of what the operand is made of
        return (f"{farthest:.3g}", is_root) if distance > most else ("", False)

    def causes(self) -> list[str]:
        """Return a sentence for each number of the source that the format of the failing operation rounds away."""
        names = {self._site.text(x): near for x, near in self._rounded.items()}
        words = f"in {self._dtype}, so it keeps nothing away from"
        return [f"`{name}` is {near} {words} {near}" for name, near in names.items()]

    def proposals(self) -> Iterator[Proposal]:
        """Yield the changes, stable forms before guards, each once."""
        for number, near in self._rounded.items():
            around = (self._operands(x) for x in self._site.ancestors(number))
            beside = [x for operands in around for x in operands if self._site.constant(x) is None][:1]
            if near == 0:
                yield from self._larger(number, beside)
            yield from self._wider(beside)
        nodes = [x for x in ast.walk(self._site.node) if isinstance(x, ast.expr) and self._operands(x)]
        for row, expression in product(STABLE, nodes):
            yield from self.changes(expression, row)
        for node in self.failing:
            yield from self._untaken(node)
        if self._dtype == "float16":
            yield from self._infinities()
            alike = dict.fromkeys((*self.failing[:1], *self._kin))
            yield from self._wider(self._operands(x)[0] for x in alike)
        for node, row in product([*self._sources, *self.failing], GUARDS):
            yield from self.changes(node, row)
        yield from self._infinities()

    def _new(self, changes: Iterable[Change], words: str, kind: str = "", *exact: Edit) -> Iterator[Proposal]:
        for node, edits in changes:
            if edits not in self._known and any(self._site.file.part(span) != text for span, text in edits):
                self._known.add(edits)
                yield Proposal(node, edits, words, kind, exact)

    def _larger(self, eps: ast.expr, beside: Sequence[ast.expr]) -> Iterator[Proposal]:
        """Yield the change that makes an eps larger, a name in the whole function.

        Float64 is the measure with the new one too, if that moves no value beside it but those that the old one moves.
        """
        form = "EPS" if isinstance(eps, ast.Constant) else "max(X, EPS)"
        uses = [eps, *(self._site.same(eps) if isinstance(eps, ast.Name) else ())]
        first, *others = (self._change(x, form, Binding({"X": x})) for x in uses)
        change, near, far = _joined(first, others), self._number(eps) or 0, 100 * float(self._numbers["EPS"])
        values = [x.abs() for node in beside for x in self.tensors(node)]
        is_apart = bool(values) and all(bool(((x <= near) | (x >= far)).all()) for x in values)
        yield from self._new([change], EPS_WORDS, "", *(change[1] if is_apart else ()))

    def _wider(self, nodes: Iterable[ast.expr]) -> Iterator[Proposal]:
        changes = [self._change(x, "X.float()", Binding({"X": x})) for x in nodes]
        yield from self._new([_joined(x, changes[1:]) for x in changes[:1]], _WIDER)

    def _change(self, node: ast.AST, form: str, binding: Binding) -> Change:
        numbers = {**self._numbers, "BOUND": self._bound(binding)}
        return node, written(self._site, node, form, binding, numbers)

    def changes(self, node: ast.AST, row: Row) -> Iterator[Proposal]:
        """Yield the changes that a row makes at a node, none where the row is for another case.

        The first ones are for all operations of its kind in the statement, of which others may fail in another batch.
        A stable form is for what has to do with the failure, and those may have another one.
        """
        binding = match(self._site, row.pattern, node)
        if binding is None or (row.kind == "stable" and not self._causes & binding.nodes):
            return
        rows, kin = STABLE if row.kind == "stable" else (row,), list[Change]()
        for x, each in product([x for x in self._kin if x is not node], rows):
            bound = match(self._site, each.pattern, x)
            kin += [] if bound is None else self._written(x, each, bound)[-1:]
        changes = self._written(node, row, binding)
        wide = [_joined(change, kin) for change in changes]
        yield from self._new((*wide, *changes[-1:]), row.words, row.kind)

    def _written(self, node: ast.AST, row: Row, binding: Binding) -> list[Change]:
        """Return the changes that a row makes at one node, the one for the other uses of its operand first."""
        site, part = self._site, binding.letters.get(row.part, node)
        is_constant = row.part and site.constant(part) is not None
        is_statement = not row.part and isinstance(node, ast.stmt)
        if is_constant or is_statement or not self._holds(row.condition, binding):
            return []

        def change(place: Any) -> Change:
            letters = {**binding.letters, row.part: place} if row.part else binding.letters
            return self._change(place, row.form, binding._replace(letters=letters))

        narrow, uses = (node, change(part)[1]), site.same(part) if row.spreads else []
        made = site.definition(part) if uses else None
        return [_joined(narrow, map(change, uses)), narrow] if made is None else [change(made)]

    def _holds(self, condition: str, binding: Binding) -> bool:
        kinds, _, operations = condition.partition("in ")
        failed = self._operation.removesuffix("_forward").removesuffix("2d")
        is_failing = not operations or failed in operations.split()
        return is_failing and all(self._is(kind, binding) for kind in kinds.split())

    def _is(self, kind: str, binding: Binding) -> bool:
        site, letters = self._site, binding.letters
        if kind == "bound":
            return self._bound(binding) != ""
        if kind == "unlogged":
            return not any(site.feeds(x, ("log", "log2", "log10")) for x in binding.nodes)
        if kind == "variable":
            return all(site.constant(x) is None for x in letters.values())
        if kind == "sole":
            return not any(site.same(x) for x in binding.nodes if isinstance(x, ast.Name))
        if kind == "pole":
            power = self._number(letters["P"])
            return power is None or power < 1 or power != int(power)
        operand = letters.get("B") or letters["X"]
        if kind in ("int", "number"):
            return isinstance(self._number(operand), int if kind == "int" else int | float)
        tensors = self.tensors(operand)
        if kind == "empty":
            return any(not x.numel() for x in tensors)
        if kind == "zero":
            eps, is_known = float(self._numbers["EPS"]), site.constant(operand) is None
            return is_known and not any(bool(((x != 0) & (x.abs() < eps)).any()) for x in tensors)
        made = site.defined(operand)
        # A difference has both signs in other batches, unless it is one of a number, as `1 - p`.
        if (kind, self._name(made)) == ("positive", "sub") and site.constant(self._operands(made)[0]) is None:
            return False
        most = 1 if kind == "fraction" else math.inf
        if not tensors or any(x.is_complex() or bool(((x < 0) | (x > most)).any()) for x in tensors):
            return False
        if kind != "count" or any(bool((x != x.round()).any()) for x in tensors):
            return kind != "count"
        texts = map(ast.unparse, (operand, made, site.defined(made)))
        return not any(x.is_floating_point() for x in tensors) or any(map(says_count, texts))

    def tensors(self, node: ast.AST) -> list[Tensor]:
        """Return the tensors that an expression is in float64."""
        return [x for x in self.values.get(node, []) if isinstance(x, Tensor)]

    def _number(self, node: ast.AST) -> float | None:
        """Return the number that a node is or was, None where it is none."""
        values = [self._site.constant(node), *self.values.get(node, [])]
        return next((x for x in values if isinstance(x, int | float)), None)

    def _bound(self, binding: Binding) -> str:
        """Return the bound of an exponent that float64 shows: "" where it goes past the end of the format there too."""
        values = self.tensors(binding.letters.get("X", self._site.node))
        if not values or any(x.is_complex() or not bool(x.isfinite().all()) for x in values):
            return ""
        largest = max((float(x.max()) for x in values if x.numel()), default=math.inf)
        return f"{max(0, math.ceil(largest))}" if largest < 0.9 * math.log(self._format.max) else ""

    def _untaken(self, node: ast.AST) -> Iterator[Proposal]:
        """Yield changes that give the elements that are not taken a safe operand, or none.

        The gradient of an element that `where` or an index does not take is 0 times what comes of it.
        """
        operands = [x for x in self._operands(node) if self._site.constant(x) is None]
        for inner, above in self._site.users(node):
            where = match(self._site, "where(C, A, B)", above)
            if isinstance(above, ast.Subscript) and above.value is inner and isinstance(node, ast.Call):
                # `loss(a, b)[valid]` becomes `loss(a[valid], b[valid])`.
                arguments = node.args or [getattr(node.func, "value", node.func)]
                names = "|".join(x.id for x in arguments if isinstance(x, ast.Name))
                if names and isinstance(above.slice, ast.Name):
                    index = above.slice.id
                    text = re.sub(rf"\b({names})\b", rf"\1[{index}]", self._site.text(node))
                    words = f"compute the elements that `{index}` takes, and no others"
                    yield from self._new([(above, (placed(self._site, above, text),))], words)
                return
            if where is not None and operands:
                made, first, second = (where.letters[letter] for letter in "CAB")
                forms = {first: "torch.where(C, X, 1.0)", second: "torch.where(C, 1.0, X)"}
                x = operands[-1 if self._name(node) == "div" else 0]
                words = "give the branch that `where` does not take a safe operand"
                for condition in (made, self._site.defined(made)):
                    if inner in forms and self._site.is_known_at(x, condition):
                        change = self._change(x, forms[inner], Binding({"C": condition, "X": x}))
                        yield from self._new([(node, change[1])], words)
                return

    def _infinities(self) -> Iterator[Proposal]:
        """Propose finite numbers for those that the function writes and the format has as infinite, as in a mask."""
        lowest, exact = self._numbers["LOWEST"], numbers_of("float64")["LOWEST"]
        for node in ast.walk(self._site.node):
            is_signed = isinstance(self._site.parents.get(node), ast.UnaryOp)  # tried with its sign alone
            value = self._site.constant(node) if isinstance(node, ast.expr) and not is_signed else None
            if not isinstance(value, int | float) or abs(value) <= self._format.max:
                continue
            # A mask of the wrong sign is found in a softmax.
            span, words = self._site.file.span(node), f"write a number that {self._dtype} holds"
            if value < 0 or "softmax" in self._operation:
                yield from self._new([(node, (Edit(span, lowest),))], words, "", Edit(span, exact))
            if value > 0:
                yield from self._new([(node, (Edit(span, lowest[1:]),))], words)


def _joined(change: Change, others: Iterable[Change]) -> Change:
    """Return the change with those of others that are one edit, apart from its edits."""
    node, edits = change
    for _, more in others:
        apart = all(x.span.end <= span.start or span.end <= x.span.start for x in more for span, _ in edits)
        edits = (*more, *edits) if len(more) == 1 and apart else edits
    return node, edits
