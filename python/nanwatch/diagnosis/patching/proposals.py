"""Proposals for an operation that failed: rows of the table that apply to it, the smallest change first."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..diagnosis import Step
from .matching import Binding, Site, match, written
from .source import Edit, all_names
from .table import CALLS, GUARDS, MASK, POLES, STABLE, names_that_run, numbers_of, operation_name

_MOST_STABLE = 5
# Whole words in the name of a value that counts something, without the `s` of a plural, and what counts are computed
# from: `num_tokens` and `n_valid` are counts, `numerator` and `discount` are not.
_COUNTS = re.compile(
    r"(count|cnt|num(ber|el)?|n|len(gth)?|deg(ree)?|size|mask|valid|keep|kept|hot|bincount|eq|ne)s?"
)
# The exponent at which a format ends, the narrowest format first.
_ENDS = {"float16": 11.0, "bfloat16": 88.0, "float32": 88.0, "float64": 709.0}


def says_count(text: str) -> bool:
    """Return whether the source of an expression says that its value counts something."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return any(_COUNTS.fullmatch(word.lower()) for word in words) or re.search("==|!=|[<>]", text) is not None


class Proposal(NamedTuple):
    """A change of the source: its edits, the expression that it changes, and in words what it does."""

    edits: tuple[Edit, ...]
    node: ast.AST
    words: str


def failing_nodes(site: Site, step: Step) -> list[ast.AST]:
    """Return the nodes of the source that may be the failing operation, the likeliest first."""
    assert step.place is not None
    line, position = step.place.line, site.file.at(step.place.positions)
    names = names_that_run(operation_name(step.operation))
    ranks: dict[ast.AST, tuple[bool, bool, bool]] = {}
    for node in ast.walk(site.node):
        if isinstance(node, ast.expr | ast.AugAssign) and node.lineno <= line <= (node.end_lineno or line):
            operation, span = site.operation(node), site.file.span(node)
            if operation is not None and (span == position or operation.name in names):
                is_outside = position is None or not span.covers(position)
                ranks[node] = operation.name not in names, span != position, is_outside
    inside = [node for node, (_, _, is_outside) in ranks.items() if not is_outside]
    return sorted(inside or ranks, key=ranks.__getitem__)


def operands(site: Site, failing: Sequence[ast.AST]) -> list[ast.expr]:
    """Return the expressions whose values the guards depend on: operands of the failing operations, and any eps."""
    operations = (operation for node in failing if (operation := site.operation(node)) is not None)
    nodes = [*(x for operation in operations for x in operation.args), *added_names(site, failing)]
    return [x for x in nodes if site.constant(x) is None]


def parts(site: Site, failing: Sequence[ast.AST]) -> list[ast.AST]:
    """Return the nodes inside the likeliest failing operation, and inside what made its names."""
    inner = [node for top in failing[:1] for node in ast.walk(top) if node is not top]
    made = [value for node in inner if (value := site.definition(node)) is not None]
    return [*inner, *(node for value in made for node in ast.walk(value))]


def added_names(site: Site, failing: Sequence[ast.AST]) -> list[ast.expr]:
    """Return the numbers and names in the failing operation that are added to something, or given to a call."""
    nodes = [x for x in parts(site, failing) if isinstance(x, ast.Constant | ast.Name | ast.Attribute)]
    above = [(node, site.parents.get(node)) for node in nodes]
    return [
        node
        for node, parent in above
        if isinstance(parent, ast.keyword)
        or (isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add))
        or (isinstance(parent, ast.Call) and parent.func is not node)
    ]


class Proposer:
    """Proposes changes of a site for a step that failed. `values` are those of operands in float64, where known."""

    def __init__(
        self,
        site: Site,
        step: Step,
        failing: Sequence[ast.AST],
        values: Mapping[ast.AST, Sequence[Any]],
    ) -> None:
        self._site = site
        self._operation = operation_name(step.operation)
        dtypes = {record.dtype.removeprefix("torch.") for record in step.operands}
        self._dtype = next((name for name in _ENDS if name in dtypes), "float32")
        self._is_finite = not any(record.isfinite is False for record in step.operands)
        self._failing = list(failing)
        self._values = values
        self._numbers = numbers_of(self._dtype)
        # Numbers of the source that are not 0, and are 0 in the format of the failing operation.
        self._vanished = [x for x in added_names(site, failing) if self._vanishes(x)]

    def _vanishes(self, node: ast.expr) -> bool:
        """Return whether the format of the failing operation rounds a number to 0, as float16 does 1e-8."""
        number = self._number(node) or 0
        return number > 0 and float(torch.tensor(number, dtype=getattr(torch, self._dtype))) == 0

    def causes(self) -> list[str]:
        """Return a sentence for each number of the source that is 0 in the format of the failing operation."""
        names = dict.fromkeys(map(self._site.text, self._vanished))
        return [f"`{name}` is 0 in {self._dtype}, so it keeps nothing away from 0" for name in names]

    def proposals(self) -> Iterator[Proposal]:
        """Yield the changes, stable forms before guards, each once."""
        known: set[tuple[Edit, ...]] = set()
        for proposal in self._in_order():
            is_change = any(self._site.file.part(edit.span) != edit.text for edit in proposal.edits)
            if proposal.edits not in known and is_change:
                known.add(proposal.edits)
                yield proposal

    def _in_order(self) -> Iterator[Proposal]:
        nodes = [] if self._is_finite else parts(self._site, self._failing)
        # The operations that made the operands of the likeliest node, where one of these was not finite.
        sources = [x for x in nodes if (operation := self._site.operation(x)) and operation.name in POLES]
        for number in self._vanished:
            form = "EPS" if isinstance(number, ast.Constant) else "max(X, EPS)"
            binding = Binding({"X": number})
            yield from self._written(number, number, form, binding, "give it an eps that the format has")
        yield from islice(self._stable(sources), _MOST_STABLE)
        for node in self._failing:
            yield from self._untaken(node)
            yield from self._calls(node)
        for node in [*sources, *self._failing]:
            for row in GUARDS:
                yield from self.guard(node, row)
        yield from self._infinities()

    def _stable(self, sources: Sequence[ast.AST]) -> Iterator[Proposal]:
        """Yield stable forms of this statement and later ones that take in the failing operation."""
        failing, file = {*self._failing[:1], *sources}, self._site.file
        start = min((file.span(self._site.statement(x)).start for x in self._failing[:1]), default=0)
        nodes = [
            x
            for x in ast.walk(self._site.node)
            if isinstance(x, ast.expr)
            and (file.span(x).end > start or x in sources)
            and self._site.operation(x) is not None
        ]
        for pattern, form in STABLE:
            for node in nodes:
                binding = match(self._site, pattern, node)
                if binding is not None and failing & binding.nodes:
                    yield from self._written(node, node, form, binding, "use the stable form that torch has")

    def guard(
        self, node: ast.AST, row: tuple[str, str, str, str, str], *, holds: bool | None = None
    ) -> list[Proposal]:
        """Return the change that a row of guards makes at a node, none where the row is for another case.

        `holds` takes the place of what the row's condition gives.
        """
        pattern, part, form, condition, words = row
        binding = match(self._site, pattern, node, alike=part != "")
        if binding is None or node not in binding.nodes:
            return []
        changed = binding.letters[part] if part else node
        is_target = isinstance(node, ast.AugAssign) and changed in (node, node.target)
        if is_target or (part and self._site.constant(changed) is not None):
            return []
        if condition and not (self._holds(condition, binding) if holds is None else holds):
            return []
        numbers = {**self._numbers, "BOUND": self._bound(binding)}
        words = re.sub(r"\b[A-Z]{3,}\b", lambda name: numbers.get(name[0], name[0]), words)
        proposals = self._written(node, changed, form, binding, words, numbers)
        return [proposal for proposal in proposals if len(proposal.edits) == 1]

    def _written(
        self,
        node: ast.AST,
        changed: ast.AST,
        form: str,
        binding: Binding,
        words: str,
        numbers: Mapping[str, str] | None = None,
    ) -> list[Proposal]:
        """Return the change that writes a form in the place of a part of the node, none if it cannot be written."""
        edits = written(self._site, changed, form, binding, numbers or self._numbers)
        return [Proposal(edits, node, words)] if edits else []

    def _holds(self, condition: str, binding: Binding) -> bool:
        """Return whether the condition of a guard holds for its operand."""
        if condition == "bound":
            return self._bound(binding) != ""
        if condition == "pole":
            power = self._number(binding.letters["P"])
            return power is None or power < 1 or power != int(power)
        operand = binding.letters.get("B", binding.letters.get("X"))
        assert operand is not None
        if condition in ("int", "number"):
            return isinstance(self._number(operand), int if condition == "int" else int | float)
        tensors = self._tensors(operand)
        if not tensors or any(x.is_complex() or bool((x < 0).any()) for x in tensors):
            return False
        made = self._site.defined(operand)
        return condition == "positive" or (
            all(bool((x == x.round()).all()) for x in tensors)
            and any(says_count(ast.unparse(x)) for x in (operand, made, self._site.defined(made)))
        )

    def _tensors(self, node: ast.AST) -> list[Tensor]:
        return [x for x in self._values.get(node, []) if isinstance(x, Tensor)]

    def _number(self, node: ast.expr) -> float | None:
        """Return the number that a node is or was, None where it is none."""
        values = [self._site.constant(node), *self._values.get(node, [])]
        return next((x for x in values if isinstance(x, int | float)), None)

    def _bound(self, binding: Binding) -> str:
        """Return the bound of an exponent that float64 shows: "" where it goes past the end of the format there too."""
        values = self._tensors(binding.letters.get("X", self._site.node))
        if not values or any(x.is_complex() or not bool(x.isfinite().all()) for x in values):
            return ""
        largest = max((float(x.max()) for x in values if x.numel()), default=math.inf)
        return f"{max(0, math.ceil(largest))}" if largest < 0.9 * _ENDS[self._dtype] else ""

    def _calls(self, node: ast.AST) -> Iterator[Proposal]:
        """Yield guards of a call of any function or module, by the operation, and of its masks."""
        if not isinstance(node, ast.Call):
            return
        args = node.args or [node]
        letters = {"W": node, "X": args[0], "Y": args[-1]}
        if len(args) == 1 and isinstance(node.func, ast.Attribute) and self._operation == "mean":
            letters["X"] = node.func.value
        for operations, form, words in CALLS if self._is_finite or not node.args else ():
            if self._operation.removesuffix("_forward") in operations.split():
                yield from self._written(node, node, form, Binding(letters), words)
        for keyword in node.keywords if "softmax" in self._operation else ():
            if (keyword.arg or "").endswith("mask"):
                form, words = MASK
                yield from self._written(node, keyword.value, form, Binding({"M": keyword.value}), words)

    def _untaken(self, node: ast.AST) -> Iterator[Proposal]:
        """Yield changes that give the elements that are not taken a safe operand, or none.

        The gradient of an element that `where` or an index does not take is 0 times what comes of it.
        """
        operation, inner = self._site.operation(node), node
        args = operation.args if operation is not None else ()
        operands = [x for x in args if all_names(x)]
        for above in self._site.ancestors(node):
            if not isinstance(above, ast.expr):
                return
            if isinstance(above, ast.Subscript) and above.value is inner and isinstance(node, ast.Call):
                yield from self._indexed(above, node)
                return
            where = match(self._site, "where(C, A, B)", above)
            if where is not None and operands and isinstance(above, ast.Call):
                operand = operands[-1 if operation is not None and operation.name == "div" else 0]
                is_first = where.letters["A"] is inner
                form = "torch.where(C, X, 1.0)" if is_first else "torch.where(C, 1.0, X)"
                binding = Binding({"C": where.letters["C"], "X": operand})
                words = "give the branch that `where` does not take a safe operand"
                if is_first or where.letters["B"] is inner:
                    yield from self._written(node, operand, form, binding, words)
                return
            inner = above

    def _indexed(self, whole: ast.Subscript, call: ast.Call) -> list[Proposal]:
        """Return the call of the elements that its index takes: `loss(a[valid], b[valid])` for `loss(a, b)[valid]`."""
        names = [x.id for x in call.args if isinstance(x, ast.Name)]
        if isinstance(call.func, ast.Attribute) and not names and isinstance(call.func.value, ast.Name):
            names = [call.func.value.id]
        if not names or not isinstance(whole.slice, ast.Name):
            return []
        index = whole.slice.id
        text = re.sub(rf"\b({'|'.join(names)})\b", rf"\1[{index}]", self._site.text(call))
        words = f"compute the elements that `{index}` takes, and no others"
        return self._written(whole, whole, "W", Binding(), words, {"W": text})

    def _infinities(self) -> Iterator[Proposal]:
        """Propose finite numbers for the infinities that the function writes, as in a mask."""
        lowest, highest = self._numbers["LOWEST"], self._numbers["LOWEST"].lstrip("-")
        for node in ast.walk(self._site.node):
            value = self._site.constant(node) if isinstance(node, ast.expr) else None
            above = self._site.parents.get(node)
            is_negated = isinstance(above, ast.UnaryOp) and self._site.constant(above) is not None
            if value not in (math.inf, -math.inf) or is_negated:
                continue
            # A mask of the wrong sign is found in a softmax.
            numbers = [lowest] * (value < 0 or "softmax" in self._operation) + [highest] * (value > 0)
            for number in numbers:
                edit = Edit(self._site.file.span(node), number)
                yield Proposal((edit,), node, "write a finite number for the infinity")
