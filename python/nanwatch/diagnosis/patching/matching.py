"""The search for the patterns of `forms` in the expressions of a site, and the text of the form."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import NamedTuple

from .form_text import ATOM, NoForm, Writer
from .forms import table
from .site import OPERATORS, Site
from .terms import Operand, Reader, Term

_COMMUTATIVE = frozenset({"add", "mul"})
# Operations that pick or move elements: the logarithm of what they give is what they give of the logarithm.
_PICKS = frozenset({
    "gather", "index_select", "take_along_dim", "squeeze", "unsqueeze", "diagonal", "view", "reshape", "flatten",
    "transpose", "permute", "expand",
})  # fmt: skip
EXPONENTIALS = frozenset({"exp", "expm1", "softmax", "sigmoid", "prod"})
_DEPTH = 5


class Binding(NamedTuple):
    """What stands for the letters of a pattern, and the nodes that it matched."""

    letters: dict[str, Operand | Term]
    nodes: frozenset[ast.AST]

    def bound(self, letter: str, operand: Operand) -> Binding:
        """Return this with one more letter."""
        return Binding({**self.letters, letter: operand}, self.nodes)


class Form(NamedTuple):
    """A form: its text with how tightly that binds, and the nodes of the source whose operations it stands for."""

    text: str
    level: int
    nodes: frozenset[ast.AST]


def forms_of(site: Site, node: ast.expr) -> Iterator[Form]:
    """Yield the forms of the table for this expression, in its order."""
    matcher = Matcher(site)
    term = matcher.term(node)
    for form in () if term is None else matcher.forms(term):
        if _plain(form.text) != _plain(site.text(node)):
            yield form


def _plain(text: str) -> str:
    try:
        return ast.dump(ast.parse(text, mode="eval"))
    except SyntaxError:
        return text


class Matcher(Reader):
    """Finds the forms of operations."""

    def forms(self, term: Term, depth: int = _DEPTH) -> Iterator[Form]:
        """Yield the forms of an operation. Those inside of forms are sought to a limited depth."""
        if term.name == "log" and (picked := self._log_of_picked(term, depth)) is not None:
            yield picked
        for pattern, form in table():
            for found in self._match(pattern, term, Binding({}, frozenset())):
                nodes = set(found.nodes)
                writer = Writer(self.site, self, found.letters, lambda x: self._log(x, depth, nodes))  # noqa: B023
                try:
                    text, level = writer.write(form)
                except NoForm:
                    continue
                yield Form(text, level, frozenset(nodes))
                break

    def _log(self, operand: Operand, depth: int, nodes: set[ast.AST]) -> tuple[str, int, bool]:
        """Return the simplest logarithm of an operand, how tightly it binds, and whether it needs no exponential."""
        inner = Term("log", (operand,))
        found = next(self.forms(inner, depth - 1), None) if depth else None
        if found is None or ".log1p(" in found.text:
            raise NoForm  # which only is more exact
        nodes |= found.nodes
        names = {one.name for x in found.nodes if (one := self.site.spelt(x)) is not None}
        return found.text, found.level, not names.isdisjoint(EXPONENTIALS)

    def _log_of_picked(self, term: Term, depth: int) -> Form | None:
        """Return the logarithm of elements that are picked: they are picked of the logarithm."""
        node = term.args[0]
        whole = self.site.written_out(node) if isinstance(node, ast.expr) and depth else None
        base = whole.value if isinstance(whole, ast.Subscript) else None
        if (
            isinstance(whole, ast.Call)
            and (spelt := self.site.spelt(whole)) is not None
            and spelt.name in _PICKS
        ):
            base = spelt.args[0]
        if whole is None or base is None:
            return None
        found = next(self.forms(Term("log", (base,)), depth - 1), None)
        if found is None:
            return None
        span, around = self.site.file.span(base), self.site.file.span(whole)
        data = self.site.file.part(around).encode()
        inner = found.text if found.level == ATOM else f"({found.text})"
        start, end = span.start - around.start, span.end - around.start
        text = (data[:start] + inner.encode() + data[end:]).decode()
        own = {one for one in (term.node, node, whole) if isinstance(one, ast.AST)}
        return Form(text, ATOM, found.nodes | own)

    # Matching

    def _match(self, pattern: ast.expr, operand: Operand, binding: Binding) -> Iterator[Binding]:
        if isinstance(pattern, ast.Name):
            yield from self._letter(pattern.id, operand, binding)
            return
        wanted = _pattern_number(pattern)
        if wanted is not None:
            value = self.number(operand)
            if value is not None and math.isclose(value, wanted, rel_tol=1e-6):
                yield binding
            return
        # A name stands for what was assigned to it, and a negative of a negative for itself.
        whole = self.site.written_out(operand) if isinstance(operand, ast.expr) else operand
        term = self.term(whole)
        name, args, options, rest = _pattern_term(pattern)
        if term is None or term.name != name or len(term.args) != len(args):
            return
        nodes = {one for one in (operand, whole, term.node) if isinstance(one, ast.AST)}
        if name == "T":
            binding = binding.bound("T", Term("T", (), given=term.given))
        binding = Binding(binding.letters, binding.nodes | nodes)
        orders = [term.args, term.args[::-1]] if name in _COMMUTATIVE else [term.args]
        for order in orders:
            for found in self._all(list(zip(args, order, strict=True)), binding):
                yield from self._options(options, rest, term, found)

    def _all(self, pairs: list[tuple[ast.expr, Operand]], binding: Binding) -> Iterator[Binding]:
        if not pairs:
            yield binding
            return
        for found in self._match(*pairs[0], binding):
            yield from self._all(pairs[1:], found)

    def _letter(self, letter: str, operand: Operand, binding: Binding) -> Iterator[Binding]:
        if letter == "n" and self.number(operand) is None:
            return
        if letter not in binding.letters:
            yield binding.bound(letter, operand)
        elif self.same(binding.letters[letter], operand):
            yield binding

    def _options(
        self, wanted: dict[str, ast.expr], rest: str, term: Term, binding: Binding
    ) -> Iterator[Binding]:
        left = dict(term.options)
        for name, pattern in wanted.items():
            given = left.pop(name, None)
            if given is None:
                return
            if isinstance(pattern, ast.Constant):
                if not (isinstance(given, ast.Constant) and given.value == pattern.value):
                    return
            else:
                assert isinstance(pattern, ast.Name)
                binding = next(self._letter(pattern.id, given, binding), None)  # type: ignore[assignment]
                if binding is None:
                    return
        if not rest:
            if not left:
                yield binding
            return
        if not left and not wanted:
            return  # the form of a reduction over everything is another one
        others = Term("rest", (), left, term.given)
        before = binding.letters.get(rest)
        if before is None:
            yield binding.bound(rest, others)
        elif isinstance(before, Term) and {k: ast.dump(v) for k, v in before.options.items()} == {
            k: ast.dump(v) for k, v in left.items()
        }:
            yield binding


def _pattern_number(pattern: ast.expr) -> float | None:
    value = pattern.value if isinstance(pattern, ast.Constant) else None
    return float(value) if isinstance(value, int | float) else None


def _pattern_term(pattern: ast.expr) -> tuple[str, tuple[ast.expr, ...], dict[str, ast.expr], str]:
    """Return the name of a pattern's operation, its operands, its options, and the letter of the rest of them."""
    if isinstance(pattern, ast.BinOp):
        return OPERATORS[type(pattern.op)], (pattern.left, pattern.right), {}, ""
    if isinstance(pattern, ast.UnaryOp):
        return "neg", (pattern.operand,), {}, ""
    assert isinstance(pattern, ast.Call)
    assert isinstance(pattern.func, ast.Name)
    options = {one.arg: one.value for one in pattern.keywords if one.arg}
    rest = [one.value.id for one in pattern.keywords if one.arg is None and isinstance(one.value, ast.Name)]
    args = tuple(pattern.args)
    if pattern.func.id == "size":
        options, args = {"dim": args[1]}, args[:1]
    return pattern.func.id, args, options, "".join(rest)
