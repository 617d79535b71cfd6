"""Where a row of the table applies in the source, and the text that takes its place."""

from __future__ import annotations

import ast
import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from .source import Edit, SourceFile, Span, Target, all_names, is_self
from .table import ALIASES, SPELLINGS, STABLE

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Div: "div", ast.Pow: "pow", ast.Mult: "mul", ast.Add: "add", ast.Sub: "sub", ast.MatMult: "matmul",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Div: operator.truediv, ast.Pow: operator.pow, ast.Mult: operator.mul, ast.Add: operator.add,
    ast.Sub: operator.sub,
}  # fmt: skip
_COMMUTATIVE = ("add", "mul")
_SAME_ARGUMENT = {"axis": "dim", "keepdims": "keepdim"}
# Methods that may be called twice on the operand of a form: they copy nothing, or little.
_CHEAP = frozenset({
    "abs", "add", "clamp", "detach", "diagonal", "div", "double", "erf", "exp", "expand", "flatten", "float", "gather",
    "half", "log", "log_softmax", "mean", "mul", "neg", "norm", "permute", "pow", "relu", "reshape", "sigmoid", "size",
    "softmax", "sqrt", "square", "squeeze", "sub", "sum", "t", "tanh", "to", "transpose", "type_as", "unsqueeze",
    "view",
})  # fmt: skip
_DEPTH = 6  # of names that are followed to what made them


class CallForm(NamedTuple):
    """An operation in the source, however it is spelt: the object that has a method is the first of `args`."""

    name: str
    args: tuple[ast.expr, ...]
    keywords: tuple[ast.keyword, ...] = ()


class Binding(NamedTuple):
    """The source that each letter of a pattern stands for, and all nodes that the pattern took in.

    `rest` are the arguments for `...`. `inlined` are the assignments whose names the pattern has followed.
    """

    letters: Mapping[str, ast.expr]
    rest: tuple[tuple[ast.expr, ...], tuple[ast.keyword, ...]] | None
    nodes: frozenset[ast.AST]
    inlined: tuple[ast.Assign, ...] = ()


class NoForm(Exception):  # noqa: N818
    """The form cannot be written here."""


class Site:
    """The function that runs a line, and what its text tells: operations, modules, and what made a name."""

    def __init__(self, target: Target, file: SourceFile, node: ast.AST) -> None:
        self.target = target
        self.file = file
        self.node = node
        self.parents = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
        self._bound: dict[str, list[tuple[int, ast.Assign | None]]] = {}
        for name in self.parents:
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                above = self.parents[name]
                is_plain = isinstance(above, ast.Assign) and len(above.targets) == 1
                made = above if is_plain and isinstance(above, ast.Assign) else None
                end = file.span(name if made is None else made).end
                self._bound.setdefault(name.id, []).append((end, made))
        for bindings in self._bound.values():
            bindings.sort(key=lambda pair: pair[0])

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around this one, the nearest first."""
        while (node := self.parents.get(node)) is not None:  # type: ignore[assignment]
            yield node

    def statement(self, node: ast.AST) -> ast.AST:
        """Return the statement that the node is a part of."""
        around = (above for above in (node, *self.ancestors(node)) if isinstance(above, ast.stmt))
        return next(around, self.node)

    def constant(self, node: ast.AST) -> Any:
        """Return the module or number that a node stands for, by the globals of the function; else None."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int | float) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.constant(node.operand)
            return -value if isinstance(value, int | float) else None
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.constant(node.left), self.constant(node.right)
            if isinstance(left, int | float) and isinstance(right, int | float):
                with suppress(ArithmeticError):
                    return _ARITHMETIC[type(node.op)](left, right)
            return None
        if isinstance(node, ast.Name):
            value = self.target.names.get(node.id) if node.id not in self._bound else None
        elif isinstance(node, ast.Attribute):
            owner = self.constant(node.value)
            value = getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float":
            text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            value = float(text) if text in ("inf", "-inf") else None
        elif isinstance(node, ast.Call) and isinstance(
            owner := self.constant(node.func), BuiltinFunctionType
        ):
            numbers = [self.constant(argument) for argument in node.args]
            is_math = owner.__module__ == "math" and all(isinstance(x, int | float) for x in numbers)
            value = owner(*numbers) if is_math else None
        else:
            return None
        return value if isinstance(value, int | float | ModuleType | BuiltinFunctionType) else None

    def call_form(self, node: ast.AST) -> CallForm | None:
        """Return the operation that the node is, None where it is none."""
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return CallForm(_OPERATORS[type(node.op)], (node.left, node.right))
        if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
            return CallForm(_OPERATORS[type(node.op)], (node.target, node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return CallForm("neg", (node.operand,))
        if not isinstance(node, ast.Call) or any(isinstance(x, ast.Starred) for x in node.args):
            return None
        args, name = tuple(node.args), ""
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            # `self.softmax(x)` calls a module.
            is_method = not is_self(node.func.value) and not isinstance(
                self.constant(node.func.value), ModuleType
            )
            args = (node.func.value, *args) if is_method else args
        elif isinstance(node.func, ast.Name):
            function = self.target.names.get(node.func.id)
            is_torch = isinstance(function, FunctionType | BuiltinFunctionType) and "torch" in str(
                getattr(function, "__module__", None) or "torch"
            )
            name = node.func.id if is_torch else ""
        keywords = tuple(node.keywords)
        if not args and keywords and keywords[0].arg == "input":
            args, keywords = (keywords[0].value,), keywords[1:]
        name = name if name.startswith("__") else name.removesuffix("_")
        form = CallForm(ALIASES.get(name, name), args, keywords)
        if form.name == "norm":
            form = self._without_order(form)
        return form if name and args else None

    def _without_order(self, form: CallForm) -> CallForm:
        """Return a norm without its order, where that is 2; another order makes it another function."""
        named = next((x for x in form.keywords if x.arg in ("p", "ord")), None)
        order = named.value if named is not None else form.args[1] if len(form.args) > 1 else None
        if order is None:
            return form
        if self.constant(order) != 2 and getattr(order, "value", None) not in ("fro", None):
            return CallForm("norm_of_another_order", form.args, form.keywords)
        args = form.args if named is not None else (form.args[0], *form.args[2:])
        return CallForm("norm", args, tuple(x for x in form.keywords if x is not named))

    def definition(self, node: ast.AST) -> ast.Assign | None:
        """Return the plain assignment that made a local name, if it ran before and nothing in it has changed since."""
        if not isinstance(node, ast.Name) or node not in self.parents:
            return None
        start = self.file.span(self.statement(node)).start if node in self.parents else 0
        made, assignment = self._last(node.id, start)
        if assignment is None or self.parents.get(assignment) not in (self.node, *self.ancestors(node)):
            return None
        names = all_names(assignment.value)
        is_same = node.id not in names and all(self._last(name, start)[0] < made for name in names)
        return assignment if is_same else None

    def _last(self, name: str, start: int) -> tuple[int, ast.Assign | None]:
        bindings = self._bound.get(name, ())
        return next((pair for pair in reversed(bindings) if pair[0] <= start), (-1, None))

    def module(self, name: str) -> str:
        """Return how this file writes `torch`, `F` or `math`. Raise NoForm where it does not import it."""
        wanted = {"torch": torch, "F": torch.nn.functional, "math": math}[name]
        names = self.target.names
        if alias := next((alias for alias, value in names.items() if value is wanted), ""):
            return alias
        nn = next((alias for alias, value in names.items() if value is torch.nn), "")
        root = next((alias for alias, value in names.items() if value is torch), "")
        if name == "F" and (nn or root):
            return f"{nn}.functional" if nn else f"{root}.nn.functional"
        raise NoForm(name)

    def is_bound(self, name: str) -> bool:
        """Return whether the function binds the name, or the file has it."""
        arguments = {x.arg for x in ast.walk(self.node) if isinstance(x, ast.arg)}
        return name in self._bound or name in arguments or name in self.target.names

    def is_cheap(self, node: ast.AST) -> bool:
        """Return whether the expression may be computed a second time: it calls no module and draws nothing."""
        return all(self._is_cheap(inner) for inner in ast.walk(node))

    def _is_cheap(self, node: ast.AST) -> bool:
        if isinstance(
            node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Starred | ast.MatMult
        ):
            return False
        if not isinstance(node, ast.Call):
            return True
        form = self.call_form(node)
        return form is not None and form.name in _CHEAP


@functools.cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@functools.cache
def _spellings() -> dict[str, list[tuple[list[ast.expr], ast.expr]]]:
    """Return for each function the operands and the patterns of its other spellings."""
    rows: dict[str, list[tuple[list[ast.expr], ast.expr]]] = {}
    for pattern, others in SPELLINGS.items():
        form = _pattern_form(_parsed(pattern))
        assert form is not None
        rows[form.name] = [(list(form.args), _parsed(text)) for text in others]
    return rows


def _pattern_form(pattern: ast.expr) -> CallForm | None:
    if isinstance(pattern, ast.BinOp):
        return CallForm(_OPERATORS[type(pattern.op)], (pattern.left, pattern.right))
    if isinstance(pattern, ast.UnaryOp):
        return CallForm("neg", (pattern.operand,))
    if isinstance(pattern, ast.Call):
        name = pattern.func.id if isinstance(pattern.func, ast.Name) else getattr(pattern.func, "attr", "")
        return CallForm(name, tuple(pattern.args), tuple(pattern.keywords))
    return None


def is_letter(node: ast.AST) -> bool:
    """Return whether the node of a pattern stands for any expression."""
    return isinstance(node, ast.Name) and len(node.id) == 1


_EMPTY = Binding({}, None, frozenset())


class Matcher:
    """Matches patterns against the source of a site."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def match(self, pattern: str, node: ast.AST) -> Binding | None:
        """Return the first way in which the pattern stands for the node."""
        return next(self._match(_parsed(pattern), node, _EMPTY, _DEPTH), None)

    def _match(self, pattern: ast.expr, node: ast.AST, binding: Binding, depth: int) -> Iterator[Binding]:
        if is_letter(pattern):
            assert isinstance(pattern, ast.Name)
            yield from self._letter(pattern.id, node, binding)
            return
        if isinstance(pattern, ast.Constant):
            value = self.site.constant(node)
            is_number = isinstance(value, int | float) and not isinstance(value, ModuleType)
            if is_number and math.isclose(value, float(pattern.value), rel_tol=1e-6):  # type: ignore[arg-type]
                yield binding
            return
        if isinstance(pattern, ast.Name):  # a number with a name
            if pattern.id == "PI" and self.site.constant(node) == math.pi:
                yield binding
            return
        if isinstance(pattern, ast.Subscript):
            yield from self._shape(pattern, node, binding)
            return
        assignment = self.site.definition(node) if depth else None
        if assignment is not None:
            nodes = binding.nodes | {node}
            inner = binding._replace(nodes=nodes, inlined=(*binding.inlined, assignment))
            yield from self._match(pattern, assignment.value, inner, depth - 1)
            return
        wanted, form = _pattern_form(pattern), self.site.call_form(node)
        if wanted is None or form is None or not isinstance(node, ast.AST):
            return
        seen = binding._replace(nodes=binding.nodes | {node})
        if ALIASES.get(wanted.name, wanted.name) == form.name:
            yield from self._arguments(wanted, form, seen, depth)
        for operands, other in _spellings().get(wanted.name, ()):
            replaced = _with_operands(other, dict(zip(map(ast.dump, operands), wanted.args, strict=False)))
            yield from self._match(replaced, node, binding, depth - 1)

    def _letter(self, letter: str, node: ast.AST, binding: Binding) -> Iterator[Binding]:
        if not isinstance(node, ast.expr):
            return
        if letter == "N" and not isinstance(self.site.constant(node), int | float):
            return
        if letter == "S" and not self._is_scalar(node):
            return
        bound = binding.letters.get(letter)
        if bound is None:
            yield binding._replace(letters={**binding.letters, letter: node})
        elif self._is_same(bound, node):
            yield binding

    def _is_scalar(self, node: ast.expr) -> bool:
        assignment = self.site.definition(node)
        value = node if assignment is None else assignment.value
        is_own = isinstance(value, ast.Attribute) and is_self(value.value)
        names = {getattr(x, "attr", "") for x in ast.walk(value)}
        return is_own or self.site.constant(value) is not None or not names.isdisjoint({"shape", "size"})

    def _is_same(self, left: ast.expr, right: ast.expr) -> bool:
        if ast.dump(left) == ast.dump(right):
            return True
        values = [
            definition.value if (definition := self.site.definition(node)) else node for node in (left, right)
        ]
        return values != [left, right] and ast.dump(values[0]) == ast.dump(values[1])

    def _shape(self, pattern: ast.Subscript, node: ast.AST, binding: Binding) -> Iterator[Binding]:
        """Match `X.shape[D]`, also as `X.size(D)`."""
        assert isinstance(pattern.value, ast.Attribute)
        form = self.site.call_form(node)
        pair = form.args if form is not None and form.name == "size" and len(form.args) == 2 else None
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "shape":
            assert isinstance(node.value, ast.Attribute)
            pair = node.value.value, node.slice
        if pair is not None:
            for inner in self._match(pattern.value.value, pair[0], binding, 0):
                yield from self._match(pattern.slice, pair[1], inner, 0)

    def _arguments(self, wanted: CallForm, form: CallForm, binding: Binding, depth: int) -> Iterator[Binding]:
        patterns = list(wanted.args)
        takes_rest = bool(patterns) and isinstance(patterns[-1], ast.Constant) and patterns[-1].value is ...
        patterns = patterns[:-1] if takes_rest else patterns
        args, keywords = list(form.args), {x.arg or "**": x for x in form.keywords}
        if len(args) < len(patterns):
            return
        pairs = list(zip(patterns, args, strict=False))
        args = args[len(patterns) :]
        for keyword in wanted.keywords:
            assert keyword.arg is not None
            given = next((k for k in keywords if _SAME_ARGUMENT.get(k, k) == keyword.arg), None)
            if given is not None:
                pairs.append((keyword.value, keywords.pop(given).value))
            elif args:
                pairs.append((keyword.value, args.pop(0)))
            else:
                return
        if takes_rest:
            rest = (tuple(args), tuple(keywords.values()))
            if not args and not keywords:
                return  # the row without `...` is for this
            if binding.rest is not None and _dump(binding.rest) != _dump(rest):
                return
            binding = binding._replace(rest=rest)
        elif args or keywords:
            return
        orders = [pairs]
        if wanted.name in _COMMUTATIVE and len(pairs) == 2:
            orders.append([(pairs[0][0], pairs[1][1]), (pairs[1][0], pairs[0][1])])
        for order in orders:
            yield from self._all(order, binding, depth)

    def _all(self, pairs: list[tuple[ast.expr, ast.expr]], binding: Binding, depth: int) -> Iterator[Binding]:
        if not pairs:
            yield binding
            return
        if isinstance(pairs[0][0], ast.Constant) and isinstance(pairs[0][0].value, bool):
            value = pairs[0][1].value if isinstance(pairs[0][1], ast.Constant) else None
            if value is pairs[0][0].value:
                yield from self._all(pairs[1:], binding, depth)
            return
        for inner in self._match(*pairs[0], binding, depth):
            yield from self._all(pairs[1:], inner, depth)


def _dump(rest: tuple[tuple[ast.expr, ...], tuple[ast.keyword, ...]]) -> list[str]:
    return [ast.dump(node) for part in rest for node in part]


def _with_operands(pattern: ast.expr, operands: Mapping[str, ast.expr]) -> ast.expr:
    """Return the pattern with its letters replaced by other patterns."""

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return operands.get(ast.dump(node), node)

        def visit_Constant(self, node: ast.Constant) -> ast.expr:
            return node

    return Replace().visit(copy.deepcopy(pattern))  # type: ignore[no-any-return]


class Writer(ast.NodeTransformer):
    """Writes a form: its letters become what they stand for in the source.

    A part of an inlined assignment that has effects is bound to a new name where it stood: `hoists` has these edits.
    """

    def __init__(
        self, matcher: Matcher, binding: Binding, numbers: Mapping[str, str], whole: ast.AST
    ) -> None:
        self._matcher = matcher
        self._site = matcher.site
        self._binding = binding
        self._numbers = numbers
        self._statement = matcher.site.statement(whole)
        self.hoists: list[Edit] = []
        self._hoisted: dict[ast.expr, str] = {}
        self._logs: list[bool] = []

    def write(self, form: str) -> ast.expr:
        """Return the form as a tree. Raises NoForm."""
        tree: ast.expr = self.visit(copy.deepcopy(_parsed(form)))
        if self._logs and not any(self._logs):
            raise NoForm("no logarithm becomes simpler")
        return ast.fix_missing_locations(tree)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return what a letter, a module or a number stands for."""
        if node.id in ("torch", "F", "math"):
            return _parsed(self._site.module(node.id))
        if node.id in self._numbers:
            return ast.Name(self._numbers[node.id])
        if len(node.id) > 1 or node.id not in self._binding.letters:
            return node
        value = self._binding.letters[node.id]
        is_elsewhere = self._site.statement(value) is not self._statement
        if is_elsewhere and not self._site.is_cheap(value):
            return ast.Name(self._hoist(value))
        return copy.deepcopy(value)

    def _hoist(self, value: ast.expr) -> str:
        """Give the expression a name on a line of its own, before the assignment that computes it."""
        if value in self._hoisted:
            return self._hoisted[value]
        assignment = self._site.statement(value)
        start = self._site.file.span(assignment)
        column = self._site.file.column(start)
        if column.strip() or not isinstance(assignment, ast.Assign):
            raise NoForm("the assignment does not begin its line")
        names = ("logits", "scores", "operand", "operand_2")
        name = next((name for name in names if not self._site.is_bound(name)), None)
        if name is None:
            raise NoForm("no name is free")
        text = self._site.file.part(self._site.file.span(value))
        self.hoists += [
            Edit(Span(start.start, start.start), f"{name} = {text}\n{column}"),
            Edit(self._site.file.bracketed(self._site.file.span(value)), name),
        ]
        self._hoisted[value] = name
        return name

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        """Write a negative without two signs."""
        operand = self.visit(node.operand)
        if isinstance(operand, ast.UnaryOp) and isinstance(operand.op, ast.USub):
            return operand.operand
        return ast.UnaryOp(node.op, operand)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Write a call with its further arguments, and a logarithm by the table."""
        if isinstance(node.func, ast.Name) and node.func.id == "LOG":
            return self._log(node.args[0])
        rest_args, rest_keywords = self._binding.rest or ((), ())
        args: list[ast.expr] = []
        keywords: list[ast.keyword] = []
        for argument in node.args:
            if isinstance(argument, ast.Constant) and argument.value is ...:
                args += [copy.deepcopy(x) for x in rest_args]
                keywords += [copy.deepcopy(x) for x in rest_keywords]
            else:
                args.append(self.visit(argument))
        given = [ast.keyword(x.arg, self.visit(x.value)) for x in node.keywords]
        replaced = {x.arg for x in given} | {"correction" for x in given if x.arg == "unbiased"}
        keywords = [x for x in keywords if x.arg not in replaced]
        return ast.Call(self.visit(node.func), args, [*keywords, *given])

    def _log(self, letter: ast.expr) -> ast.expr:
        """Return the simplest logarithm of what a letter stands for."""
        assert isinstance(letter, ast.Name)
        operand = self._binding.letters[letter.id]
        value = self._site.constant(operand)
        if isinstance(value, int | float) and value > 0:
            return ast.Name(repr(math.log(value)))
        logarithm = ast.Call(_parsed(f"{self._site.module('torch')}.log"), [operand], [])
        for pattern, form in STABLE:
            if not pattern.startswith("log"):
                continue
            binding = self._matcher.match(pattern, logarithm)
            if binding is None:
                continue
            writer = Writer(self._matcher, binding, self._numbers, self._statement)
            writer._hoisted, writer._statement = self._hoisted, self._statement
            try:
                tree = writer.write(form)
            except NoForm:
                continue
            self.hoists += writer.hoists
            self._logs.append(True)
            return tree
        self._logs.append(False)
        return ast.Call(logarithm.func, [self.visit(copy.deepcopy(letter))], [])


def edit_of(site: Site, node: ast.AST, tree: ast.expr) -> Edit:
    """Return the edit that puts an expression in the place of a node, in brackets where it needs them."""
    text = ast.unparse(tree)
    text = text if '"' in text else text.replace("'", '"')
    above = site.parents.get(node)
    span = site.file.span(node)
    is_atom = isinstance(tree, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Constant)
    needs = isinstance(
        above, ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Subscript | ast.Compare | ast.IfExp
    )
    is_called = isinstance(above, ast.Call) and above.func is node
    if not is_atom and (needs or is_called) and site.file.bracketed(span) == span:
        text = f"({text})"
    elif is_atom and not isinstance(above, ast.Call | ast.keyword | ast.Tuple | ast.List):
        span = site.file.bracketed(span)
    return Edit(span, text)


def clamped(site: Site, node: ast.expr, tree: ast.expr) -> ast.expr:
    """Return a clamp of a clamp as one: the bounds that the source has, and those of the guard."""
    is_clamp = (
        isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and tree.func.attr == "clamp"
    )
    inner = site.call_form(node)
    if not is_clamp or inner is None or inner.name not in ("clamp", "clamp_min", "clamp_max"):
        return tree
    assert isinstance(tree, ast.Call)
    names = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[inner.name]
    bounds: dict[str, ast.expr] = dict(zip(names, inner.args[1:], strict=False))
    bounds |= {x.arg: x.value for x in inner.keywords if x.arg in ("min", "max")}
    bounds |= dict(zip(("min", "max"), tree.args, strict=False))
    bounds |= {x.arg: x.value for x in tree.keywords if x.arg}
    keywords = [ast.keyword(name, bounds[name]) for name in ("min", "max") if name in bounds]
    return ast.Call(ast.Attribute(copy.deepcopy(inner.args[0]), "clamp"), [], keywords)
