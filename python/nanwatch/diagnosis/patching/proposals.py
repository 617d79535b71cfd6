"""Proposals for an operation that failed: rows of the table that apply to it, the smallest change first."""

from __future__ import annotations

import ast
import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..diagnosis import Expression
from .matching import (
    Binding,
    Matcher,
    NoForm,
    Site,
    Writer,
    _parsed,
    _pattern_form,
    clamped,
    edit_of,
    is_letter,
)
from .source import Edit
from .table import ARGUMENTS, CALLS, GUARDS, LIKE, POLES, STABLE, Guard, names_that_run, numbers_of

_MOST_STABLE = 5
_SMALL = 1e-2
# Functions whose guards are also for `X ** 0.5`, `1 / sqrt(X)`, `1 / X`.
_SPELT_BY_OPERATORS = ("sqrt", "rsqrt", "reciprocal")
# Whole words in the name of a value that counts something, without the `s` of a plural, and what counts are computed
# from: `num_tokens` and `n_valid` are counts, `numerator` and `discount` are not.
_COUNTS = re.compile(
    r"(count|cnt|num(ber|el)?|n|len(gth)?|deg(ree)?|size|mask|valid|keep|kept|hot|bincount|eq|ne)s?"
)
# The exponent at which a format ends.
_ENDS = {"float64": 709.0, "float32": 88.0, "bfloat16": 88.0, "float16": 11.0}


def says_count(text: str) -> bool:
    """Return whether the source of an expression says that its value counts something."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return any(_COUNTS.fullmatch(word.lower()) for word in words) or re.search("==|!=|[<>]", text) is not None


class Failure(NamedTuple):
    """The operation that failed: its name in the table, its place, its narrowest format, and whether its gradient did.

    `is_finite`: no operand held nan or inf.
    """

    operation: str
    place: Expression
    dtype: str = "float32"
    is_backward: bool = False
    is_finite: bool = True


class Proposal(NamedTuple):
    """A change of the source: its edits, the expression that it changes, and in words what it does."""

    edits: tuple[Edit, ...]
    node: ast.AST
    words: str


def failing_nodes(site: Site, failure: Failure) -> list[ast.AST]:
    """Return the nodes of the source that may be the failing operation, the likeliest first."""
    line = failure.place.line
    nodes = [
        node
        for node in ast.walk(site.node)
        if isinstance(node, ast.expr | ast.AugAssign)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and site.call_form(node) is not None
    ]
    position = site.file.at(failure.place.positions)
    at_position = [node for node in nodes if site.file.span(node) == position]
    names = names_that_run(failure.operation)
    by_name = [node for node in nodes if (form := site.call_form(node)) and form.name in names]
    if at_position and position is not None:
        by_name = [node for node in by_name if site.file.span(node).covers(position)] or by_name
    named = [node for node in at_position if node in by_name]
    return list(dict.fromkeys([*named, *at_position, *by_name]))


def operands(site: Site, failing: Sequence[ast.AST]) -> list[ast.expr]:
    """Return the operands of the failing operations whose values the guards depend on."""
    forms = (form for node in failing if (form := site.call_form(node)) is not None)
    return [x for form in forms for x in form.args if site.constant(x) is None]


class Proposer:
    """Proposes changes of a site. `values` are those of operands in float64, as far as they are known."""

    def __init__(
        self, site: Site, failure: Failure, failing: Sequence[ast.AST], values: Mapping[ast.AST, list[Tensor]]
    ) -> None:
        self._site = site
        self._failure = failure
        self._failing = list(failing)
        self._values = values
        self._matcher = Matcher(site)
        self._numbers = numbers_of(failure.dtype)

    def proposals(self) -> Iterator[Proposal]:
        """Yield the changes, stable forms before guards, each once."""
        known: set[tuple[Edit, ...]] = set()
        for proposal in self._in_order():
            before = tuple(self._site.file.part(edit.span) for edit in proposal.edits)
            if proposal.edits not in known and before != tuple(edit.text for edit in proposal.edits):
                known.add(proposal.edits)
                yield proposal

    def _in_order(self) -> Iterator[Proposal]:
        failing = set(self._failing[:1])
        for number, proposal in enumerate(self._stable(failing)):
            if number == _MOST_STABLE:
                break
            yield proposal
        for node in self._failing:
            yield from self._untaken(node)
        sources = self._sources()
        for node in self._failing:
            yield from self._calls(node)
        for node in [*sources, *self._failing]:
            yield from self._guards(node)
        yield from self._infinities()

    def _sources(self) -> list[ast.AST]:
        """Return the operations that made the operands of the likeliest node, where one of these was not finite."""
        nodes: list[ast.AST] = []
        for failing in [] if self._failure.is_finite else self._failing[:1]:
            inner = [node for node in ast.walk(failing) if node is not failing]
            made = [binding.value for node in inner if (binding := self._site.definition(node)) is not None]
            nodes += [*inner, *(node for value in made for node in ast.walk(value))]
        return [node for node in nodes if (form := self._site.call_form(node)) and form.name in POLES]

    def _stable(self, failing: set[ast.AST]) -> Iterator[Proposal]:
        """Yield stable forms of this statement and later ones that take in the failing operation."""
        if not failing:
            return
        start = min(self._site.file.span(self._site.statement(node)).start for node in failing)
        sources = self._sources()
        nodes = [
            node
            for node in ast.walk(self._site.node)
            if isinstance(node, ast.expr)
            and self._site.call_form(node) is not None
            and (self._site.file.span(node).end > start or node in sources)
        ]
        failing = failing.union(sources)
        for pattern, form in STABLE:
            for node in nodes:
                binding = self._matcher.match(pattern, node)
                if binding is None or not failing & binding.nodes:
                    continue
                try:
                    writer = Writer(self._matcher, binding, self._numbers, node)
                    edit = edit_of(self._site, node, writer.write(form))
                except NoForm:
                    continue
                yield Proposal((*writer.hoists, edit), node, "use the stable form that torch has")

    def _guards(self, node: ast.AST) -> Iterator[Proposal]:
        for row in map(Guard._make, GUARDS):
            if (proposal := self.guard(node, row)) is not None:
                yield proposal

    def guard(self, node: ast.AST, row: Guard, *, holds: bool | None = None) -> Proposal | None:
        """Return the change that a row of guards makes at a node, None where the row is for another case.

        `holds` takes the place of what the row's condition gives.
        """
        form = self._site.call_form(node)
        pattern, text = row.pattern, row.form
        base = "" if form is None else LIKE.get(form.name, form.name)
        if form is not None and base != form.name and pattern.startswith(f"{base}("):
            pattern = pattern.replace(base, form.name, 1)
            text = text.replace(base, form.name, 1) if text.startswith(f"{base}(") else text
        wanted = _pattern_form(_parsed(pattern))
        is_same = form is not None and wanted is not None and wanted.name in (form.name, *_SPELT_BY_OPERATORS)
        binding = self._matcher.match(pattern, node) if is_same else None
        if binding is None or not (self._holds(row.condition, binding) if holds is None else holds):
            return None
        numbers = {**self._numbers, "BOUND": self._bound(binding)}
        proposal = self._guard(node, pattern, text, binding, numbers)
        words = re.sub(r"\b[A-Z]{3,}\b", lambda name: numbers.get(name[0], name[0]), row.words)
        return proposal and proposal._replace(words=words)

    def _guard(
        self, node: ast.AST, pattern: str, form: str, binding: Binding, numbers: Mapping[str, str]
    ) -> Proposal | None:
        """Return the smallest edit that makes the form of the pattern."""
        before, after = _smallest(_parsed(pattern), _parsed(form))
        changed: ast.AST = node
        if is_letter(before):
            assert isinstance(before, ast.Name)
            changed = binding.letters[before.id]
            is_target = isinstance(node, ast.AugAssign) and changed is node.target
            if is_target or (self._site.constant(changed) is not None and before.id != "N"):
                return None
        elif before is not _parsed(pattern):
            after = _parsed(form)
        if not isinstance(changed, ast.expr):
            return None
        try:
            writer = Writer(self._matcher, binding, numbers, changed)
            tree = writer.write(ast.unparse(after))
        except NoForm:
            return None
        if writer.hoists:
            return None
        return Proposal((edit_of(self._site, changed, clamped(self._site, changed, tree)),), node, "")

    def _holds(self, condition: str, binding: Binding) -> bool:
        """Return whether all words of a row's condition hold for the operand that the row is for."""
        letter, position = ("B", 1) if "B" in binding.letters else ("X", 0)
        operand = binding.letters.get(letter)
        number = dict(self._failure.place.numbers).get(position) if self._failure.operation == "div" else None
        values = self._values.get(operand, []) if operand is not None else []
        values = [x for x in values if not x.is_complex()]
        small = self._site.constant(binding.letters["N"]) if "N" in binding.letters else None
        facts = {
            "number": number is not None,
            "int": isinstance(number, int),
            "count": self._is_count(operand, values),
            "signed": not values or any(bool((x < 0).any()) for x in values),
            "small": small is not None and 0 <= small <= _SMALL,
            "backward": self._failure.is_backward,
            "infinite": self._failure.is_backward or not self._failure.is_finite,
            "power": "P" in binding.letters and self._has_pole(binding.letters["P"]),
            "float64": self._bound(binding) != "",
        }
        return all(facts[word.strip("!")] != word.startswith("!") for word in condition.split())

    def _is_count(self, operand: ast.expr | None, values: Sequence[Tensor]) -> bool:
        if operand is None or not values:
            return False
        is_whole = all(bool(((x == x.round()) & (x >= 0)).all()) for x in values)
        texts = [ast.unparse(operand)]
        while (assignment := self._site.definition(operand)) is not None and len(texts) < 3:
            operand = assignment.value
            texts.append(ast.unparse(operand))
        return is_whole and any(map(says_count, texts))

    def _has_pole(self, exponent: ast.expr) -> bool:
        value = self._site.constant(exponent)
        if value is None:
            value = dict(self._failure.place.numbers).get(1)
        return not (isinstance(value, int | float) and value >= 1 and value == int(value))

    def _bound(self, binding: Binding) -> str:
        """Return the bound of an exponent that float64 shows: "" where it goes past the end of the format there too."""
        operand = binding.letters.get("X")
        values = [] if operand is None else self._values.get(operand, [])
        if not values or any(x.is_complex() or not bool(x.isfinite().all()) for x in values):
            return ""
        largest = max((float(x.max()) for x in values if x.numel()), default=math.inf)
        end = _ENDS.get(self._failure.dtype, 88.0)
        return f"{max(0, math.ceil(largest))}" if largest < 0.9 * end else ""

    def _calls(self, node: ast.AST) -> Iterator[Proposal]:
        """Yield guards of a call of any function or module, by the operation, and of its arguments by their names."""
        if not isinstance(node, ast.Call):
            return
        args = node.args or [node]
        letters = {"W": node, "X": args[0], "Y": args[1] if len(args) > 1 else args[0]}
        if len(args) == 1 and isinstance(node.func, ast.Attribute) and self._failure.operation == "mean":
            letters["X"] = node.func.value
        for operations, form, words in CALLS:
            is_empty = self._failure.is_finite or not node.args
            if is_empty and self._failure.operation.removesuffix("_forward") in operations.split():
                yield self._written(node, form, letters, words)
        for keyword in node.keywords:
            if (form := ARGUMENTS.get(keyword.arg or "", "")) and "softmax" in self._failure.operation:
                words = "mask no row everywhere"
                yield self._written(keyword.value, form, {"M": keyword.value}, words)

    def _written(self, node: ast.expr, form: str, letters: Mapping[str, ast.expr], words: str) -> Proposal:
        writer = Writer(self._matcher, Binding(letters, None, frozenset()), self._numbers, node)
        return Proposal((edit_of(self._site, node, writer.write(form)),), node, words)

    def _untaken(self, node: ast.AST) -> Iterator[Proposal]:
        """Yield changes that give the elements that are not taken a safe operand, or none.

        The gradient of an element that `where` or an index does not take is 0 times what comes of it.
        """
        form = self._site.call_form(node)
        variables = [
            x for x in (form.args if form else ()) if any(isinstance(y, ast.Name) for y in ast.walk(x))
        ]
        inner = node
        for above in self._site.ancestors(node):
            if not isinstance(above, ast.expr):
                return
            if isinstance(above, ast.Subscript) and above.value is inner and isinstance(node, ast.Call):
                yield from self._indexed(above, node)
                return
            where = self._site.call_form(above)
            if where is not None and where.name == "where" and len(where.args) == 3 and variables:
                condition, yes, no = where.args
                taken = next((x for x in (yes, no) if x is inner), None)
                if taken is None:
                    return
                operand = variables[-1] if form is not None and form.name == "div" else variables[0]
                text = "torch.where(C, X, 1.0)" if taken is yes else "torch.where(C, 1.0, X)"
                words = "give the branch that `where` does not take a safe operand"
                yield self._written(operand, text, {"C": condition, "X": operand}, words)
                return
            inner = above

    def _indexed(self, whole: ast.Subscript, call: ast.Call) -> Iterator[Proposal]:
        names = [x for x in call.args if isinstance(x, ast.Name)]
        if isinstance(call.func, ast.Attribute) and not names and isinstance(call.func.value, ast.Name):
            names = [call.func.value]
        if not names or not isinstance(whole.slice, ast.Name):
            return
        wanted = {ast.dump(name) for name in names}
        tree = copy.deepcopy(call)

        class Index(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                is_wanted = ast.dump(node) in wanted
                return ast.Subscript(node, copy.deepcopy(whole.slice), ast.Load()) if is_wanted else node

        words = f"compute the elements that `{whole.slice.id}` takes, and no others"
        yield Proposal((edit_of(self._site, whole, Index().visit(tree)),), whole, words)

    def _infinities(self) -> Iterator[Proposal]:
        """Propose finite numbers for the infinities that the function writes, as in a mask."""
        lowest = self._numbers["LOWEST"]
        for node in ast.walk(self._site.node):
            value = self._site.constant(node) if isinstance(node, ast.expr) else None
            if not isinstance(value, float) or not math.isinf(value):
                continue
            above = self._site.parents.get(node)
            if isinstance(above, ast.UnaryOp) and self._site.constant(above) is not None:
                continue
            is_mask = "softmax" in self._failure.operation
            for number in dict.fromkeys(
                [lowest] * (value < 0 or is_mask) + [lowest.lstrip("-")] * (value > 0)
            ):
                edit = Edit(self._site.file.span(node), number)
                yield Proposal((edit,), node, "write a finite number for the infinity")


def _smallest(before: ast.expr, after: ast.expr) -> tuple[ast.expr, ast.expr]:
    """Return the smallest parts in which a pattern and a form of the same function differ."""
    wanted, form = _pattern_form(before), _pattern_form(after)
    if wanted is None or form is None or wanted.name != form.name or type(before) is not type(after):
        return before, after
    if isinstance(after, ast.Call) and not isinstance(after.func, ast.Name):
        return before, after
    if len(wanted.args) != len(form.args) or list(map(ast.dump, wanted.keywords)) != list(
        map(ast.dump, form.keywords)
    ):
        return before, after
    parts = [
        pair for pair in zip(wanted.args, form.args, strict=True) if ast.dump(pair[0]) != ast.dump(pair[1])
    ]
    return _smallest(*parts[0]) if len(parts) == 1 else (before, after)


def narrowest(dtypes: Sequence[str]) -> str:
    """Return the narrowest of these formats, that of float32 where there is none."""
    names = {dtype.removeprefix("torch.") for dtype in dtypes}
    return next((name for name in ("float16", "bfloat16", "float32", "float64") if name in names), "float32")
