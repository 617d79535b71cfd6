"""Where a row of the table applies in the source, and the text that takes its place."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.distributions import Distribution
from torch.overrides import get_testing_overrides

from .source import Edit, SourceFile, Span, Target, all_names, called_name
from .table import ALIASES, PICKS, SPELLINGS

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Div: "div", ast.Pow: "pow", ast.Mult: "mul", ast.Add: "add", ast.Sub: "sub", ast.MatMult: "matmul",
}  # fmt: skip
# The functions in an expression that is a number whatever the program does.
_NUMBER_CALL = re.compile(r"float|math\.\w+")
# How a file may write a module of torch.
_MODULES = {
    "torch": ((torch, ""),),
    "math": ((math, ""),),
    "F": ((torch.nn.functional, ""), (torch.nn, ".functional"), (torch, ".nn.functional")),
}


class Operation(NamedTuple):
    """An operation in the source, however it is spelt: the object that has a method is the first of `args`."""

    name: str  # "" for a function or module of the program, such as a local `criterion`
    args: tuple[ast.expr, ...]
    keywords: Mapping[str, ast.expr] = {}


@functools.cache
def _parameters(name: str) -> tuple[str, ...]:
    """Return the names of a function's arguments by position; those of PyTorch's losses for a call of the program."""
    spaces = (x for x in (torch, torch.nn.functional, Distribution) if hasattr(x, name))
    function = next((getattr(x, name) for x in spaces), torch.nn.functional.mse_loss)
    return tuple(inspect.signature(get_testing_overrides().get(function, function)).parameters)


class Binding(NamedTuple):
    """The source that each letter of a pattern stands for, and all nodes that the pattern took in.

    `rest` are the arguments for `...`, each with its keyword or "", and `picks` the nodes for `pick`, the last first.
    """

    letters: Mapping[str, ast.expr] = {}
    rest: tuple[tuple[str, ast.expr], ...] = ()
    nodes: frozenset[ast.AST] = frozenset()
    picks: tuple[ast.AST, ...] = ()


@functools.cache
def parsed(text: str) -> ast.expr:
    """Return the tree of an expression of the table."""
    return ast.parse(text, mode="eval").body


class Site:
    """The function that runs a line, and what its text tells: operations, modules, and what made a name."""

    def __init__(self, target: Target, file: SourceFile) -> None:
        self.target, self.file = target, file
        self.node = node = target.node_in(file.tree)
        self.globals = target.functions[0].__globals__
        self.parents = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
        parameters = (x.arg for x in self.parents if isinstance(x, ast.arg))
        plain = [x for x in self.parents if isinstance(x, ast.Assign) and len(x.targets) == 1]
        sides = [pair for x in plain for pair in _sides(x.targets[0], x.value)]
        values = {target: value for target, value in sides if isinstance(target, ast.Name)}
        # For each local name where its bindings end, with the value of those that are plain.
        self._bound: dict[str, list[tuple[int, ast.expr | None]]] = {name: [] for name in parameters}
        for name in self.parents:
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                place = self.statement(name) if name in values else name
                self._bound.setdefault(name.id, []).append((file.span(place).end, values.get(name)))

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around this one, the nearest first."""
        while (node := self.parents.get(node)) is not None:  # type: ignore[assignment]
            yield node

    def users(self, node: Any) -> Iterator[tuple[Any, ast.AST]]:
        """Yield each expression that takes the value of a node, also by a name, after the part of it that does."""
        above = self.parents.get(node)
        if isinstance(above, ast.expr | ast.keyword):
            yield node, above
            yield from self.users(above)
        for use in self._uses.get(node, ()):
            yield from self.users(use)

    @functools.cached_property
    def _uses(self) -> dict[ast.AST, list[ast.AST]]:
        """The names that stand for the value of a node, by that node."""
        uses: dict[ast.AST, list[ast.AST]] = {}
        for name in self.parents:
            if (value := self.definition(name)) is not None:
                uses.setdefault(value, []).append(name)
        return uses

    def is_known_at(self, place: ast.AST, node: ast.AST) -> bool:
        """Return whether the names of a node have the same values at an earlier place."""
        start, end = self._start(place), self._start(node)
        return all(self._last(name, start) == self._last(name, end) for name in all_names(node))

    def statement(self, node: ast.AST) -> ast.AST:
        """Return the statement that the node is a part of."""
        around = (above for above in (node, *self.ancestors(node)) if isinstance(above, ast.stmt))
        return next(around, self.node)

    def twins(self, node: ast.AST) -> list[ast.AST]:
        """Return the statement that the node is a part of, and those of the function that differ in names alone."""
        statement = self.statement(node)
        alike = [x for x in self.parents if type(x) is type(statement) and x is not statement]
        shapes = [re.sub(r"id='\w+'", "", ast.dump(x)) for x in (statement, *alike)]
        return [statement, *(x for x, shape in zip(alike, shapes[1:], strict=True) if shape == shapes[0])]

    def constant(self, node: ast.AST) -> Any:
        """Return the module or number that a node stands for, by the globals of the function; else None."""
        names = {x: None if x in self._bound else self.globals.get(x) for x in all_names(node)}
        calls = [ast.unparse(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)]
        names["float"] = float
        is_known = all(isinstance(value, int | float | ModuleType | type) for value in names.values())
        value = None
        if is_known and all(map(_NUMBER_CALL.fullmatch, calls)):
            with suppress(Exception):  # it may divide by 0, or be no expression, as a slice
                value = eval(ast.unparse(node), {**names, "__builtins__": {}})
        return value if isinstance(value, int | float | ModuleType) else None

    def definition(self, node: ast.AST) -> ast.expr | None:
        """Return what made a local name by a plain assignment, if it ran before and nothing in it has changed since."""
        if not isinstance(node, ast.Name) or node not in self.parents:
            return None
        start = self._start(node)
        made, value = self._last(node.id, start)
        if value is None or self.parents.get(self.statement(value)) not in (self.node, *self.ancestors(node)):
            return None
        names = all_names(value)
        is_same = node.id not in names and all(self._last(name, start)[0] < made for name in names)
        return value if is_same else None

    def defined(self, node: ast.expr) -> ast.expr:
        """Return what made the name that the node is, or the node."""
        return self.definition(node) or node

    def _start(self, node: ast.AST) -> int:
        return self.file.span(self.statement(node)).start

    def _last(self, name: str, start: int) -> tuple[int, ast.expr | None]:
        bindings = (pair for pair in self._bound.get(name, ()) if pair[0] <= start)
        return max(bindings, key=lambda pair: pair[0], default=(-1, None))

    def same(self, node: ast.AST) -> list[ast.expr]:
        """Return the other places of the function where the same expression has the same value."""

        def key(x: ast.AST) -> Any:
            return ast.dump(x), [self._last(name, self._start(x)) for name in sorted(all_names(x))]

        alike = [x for x in self.parents if type(x) is type(node) and isinstance(x, ast.expr)]
        return [x for x in alike if x is not node and ast.dump(x) == ast.dump(node) and key(x) == key(node)]

    def feeds(self, node: ast.AST, operations: Sequence[str]) -> bool:
        """Return whether one of these operations takes what comes of a node, in it or by way of later names."""
        users = (operation_of(above, self) for _, above in self.users(node))
        return any(operation is not None and operation.name in operations for operation in users)

    def text(self, node: ast.AST) -> str:
        """Return the text of a node of this source."""
        return self.file.part(self.file.span(node))

    def module(self, name: str) -> str:
        """Return how this file writes `torch`, `F` or `math`. Raises LookupError where it does not import it."""
        for module, rest in _MODULES[name]:
            for alias, value in self.globals.items():
                if value is module:
                    return alias + rest
        raise LookupError(name)


def _sides(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return what an assignment binds, each with its value: the parts of a tuple are for those of another."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [*zip(target.elts, value.elts, strict=True)]
    return [(target, value)]


def operation_of(node: ast.AST, site: Site | None = None) -> Operation | None:
    """Return the operation that a node of the source is, or without a site one of the table; None where it is none."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        pair = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        return Operation(_OPERATORS[type(node.op)], pair)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return Operation("neg", (node.operand,))
    if isinstance(node, ast.Subscript):
        return Operation("item", (node.value, node.slice))
    if not isinstance(node, ast.Call) or any(isinstance(x, ast.Starred) for x in node.args):
        return None
    name, args = called_name(node), tuple(node.args)
    keywords = {ALIASES.get(x.arg or "**", x.arg or "**"): x.value for x in node.keywords}
    if site is not None and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        # `self.softmax(x)` calls a module.
        is_self = getattr(owner, "id", "") in ("self", "cls")
        if not is_self and not isinstance(site.constant(owner), ModuleType):
            args = (owner, *args)
    elif site is not None:
        function = site.globals.get(name)
        is_function = isinstance(function, FunctionType | BuiltinFunctionType)
        name = name if is_function and "torch" in str(function.__module__ or "torch") else ""
    if site is not None and not args and "input" in keywords:
        args = (keywords.pop("input"),)
    name = name if name.startswith("__") else name.removesuffix("_")
    name = ALIASES.get(name, name)
    if name == "norm" and site is not None:
        orders = [keywords.pop(key) for key in ("p", "ord") if key in keywords]
        if not orders:
            orders, args = list(args[1:2]), (*args[:1], *args[2:])
        if any(site.constant(x) != 2 and getattr(x, "value", 0) not in ("fro", None) for x in orders):
            return None
    return Operation(name, args, keywords) if args or keywords else None


def match(
    site: Site, pattern: ast.expr | str, node: ast.AST, binding: Binding | None = None
) -> Binding | None:
    """Return the first way in which the pattern stands for the node, its letters as they are bound already."""
    pattern, binding = parsed(pattern) if isinstance(pattern, str) else pattern, binding or Binding()
    if isinstance(pattern, ast.Name):
        return _letter(site, pattern.id, node, binding)
    if isinstance(pattern, ast.Constant):
        value = getattr(node, "value", None) if isinstance(pattern.value, bool) else site.constant(node)
        is_same = isinstance(value, int | float) and math.isclose(value, pattern.value, rel_tol=1e-6)  # type: ignore[arg-type]
        return binding if is_same else None
    seen = binding._replace(nodes=binding.nodes | {node})
    if (made := site.definition(node)) is not None:
        return match(site, pattern, made, seen)
    wanted, operation = operation_of(pattern), operation_of(node, site)
    assert wanted is not None
    if wanted.name == "pick":
        if operation is None or operation.name not in PICKS or not operation.args:
            return match(site, wanted.args[0], node, binding)
        return match(site, pattern, operation.args[0], seen._replace(picks=(*seen.picks, node)))
    if wanted.name == "W" and isinstance(node, ast.Call):
        seen = seen._replace(letters={**seen.letters, "W": node})
        # A mask of None is none.
        given = {x.arg or "**": x.value for x in node.keywords if getattr(x.value, "value", "") is not None}
        operation = Operation("W", tuple(node.args), given)
    if operation is None:
        return None
    if wanted.name == operation.name:
        return _arguments(site, wanted, operation, seen)
    for spelling, form in SPELLINGS:
        spelt = operation_of(parsed(form))
        inner = match(site, spelling, node) if spelt is not None and spelt.name == wanted.name else None
        if spelt is not None and inner is not None:
            args = [inner.letters[x.id] for x in spelt.args if isinstance(x, ast.Name)]
            args += [x for name, x in inner.rest if not name]
            operation = Operation(wanted.name, tuple(args), {name: x for name, x in inner.rest if name})
            bound = _arguments(site, wanted, operation, seen._replace(nodes=seen.nodes | inner.nodes))
            if bound is not None:
                return bound
    return None


def _letter(site: Site, letter: str, node: ast.AST, binding: Binding) -> Binding | None:
    if not isinstance(node, ast.expr):
        return None
    if (bound := binding.letters.get(letter)) is not None:
        texts = [{ast.dump(x), ast.dump(site.defined(x))} for x in (bound, node)]
        return binding if texts[0] & texts[1] else None
    if letter == "N" and not isinstance(site.constant(node), int | float):
        return None
    return binding._replace(letters={letter: node, **binding.letters})


def _arguments(site: Site, wanted: Operation, operation: Operation, binding: Binding) -> Binding | None:
    patterns = [x for x in wanted.args if getattr(x, "value", None) is not ...]
    args, keywords = list(operation.args), dict(operation.keywords)
    names = _parameters(operation.name)[len(args) : len(patterns)] if keywords else ()
    args += [keywords.pop(name) for name in names if name in keywords]
    if len(args) < len(patterns):
        return None
    pairs = list(zip(patterns, args, strict=False))
    args = args[len(patterns) :]
    for name, pattern in wanted.keywords.items():
        # Of several masks the last one: `key_padding_mask` mostly stands behind `attn_mask`.
        key = next((x for x in reversed(keywords) if x == name or x.endswith(f"_{name}")), None)
        if key is None and not (args and patterns):
            return None
        pairs.append((pattern, args.pop(0) if key is None else keywords.pop(key)))
    # A row without `...` is for a call without further arguments. A second `...` is the same as the first.
    if rest := (*(("", x) for x in args), *keywords.items()):
        texts = [[(name, site.text(x)) for name, x in given] for given in (rest, binding.rest or rest)]
        if texts[0] != texts[1] or len(patterns) == len(wanted.args):
            return None
        binding = binding._replace(rest=rest)
    swapped = [(pattern, node) for (pattern, _), (_, node) in zip(pairs, pairs[::-1], strict=True)]
    for order in (pairs, swapped) if wanted.name in ("add", "mul") else (pairs,):
        inner: Binding | None = binding
        for pattern, node in order:
            inner = None if inner is None else match(site, pattern, node, inner)
        if inner is not None:
            return inner
    return None


# Placeholders of a form: names that are no attributes, and `...` for further arguments, with a comma beside it.
_PLACES = re.compile(r"(?<![\w.])[A-Za-z]\w*|, \.\.\.|\.\.\., |\.\.\.")
_NAMED = ast.Name | ast.Attribute | ast.Subscript
_ATOMS = ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Constant


def written(
    site: Site, node: ast.AST, form: str, binding: Binding, numbers: Mapping[str, str]
) -> tuple[Edit, ...]:
    """Return the edits that write the form of a row in the place of a node, its own the last; () if that cannot be.

    An operand of another statement that calls something gets a name there.
    """
    named: dict[ast.expr, tuple[Edit, str]] = {}
    # Further arguments that the form gives itself.
    calls = [x for x in ast.walk(parsed(form)) if isinstance(x, ast.Call)]
    calls = [x for x in calls if any(getattr(y, "value", None) is ... for y in x.args)]
    taken = {keyword.arg for call in calls for keyword in call.keywords}
    taken |= {"correction"} if "unbiased" in taken else set()
    arguments = [(f"{name}=" * bool(name)) + site.text(x) for name, x in binding.rest if name not in taken]
    rest = ", ".join(arguments)

    def replaced(place: re.Match[str]) -> str:
        name, value = place[0], binding.letters.get(place[0])
        if "..." in name:
            return name.replace("...", rest) if rest else ""
        if name in _MODULES:
            return site.module(name)
        if value is None:
            return numbers.get(name, name)
        is_apart = site.statement(value) is not site.statement(node)
        if is_apart and isinstance(value, ast.NamedExpr):
            return value.target.id
        if is_apart and any(isinstance(x, ast.Call) for x in ast.walk(value)):
            if value not in named:
                named[value] = _named(site, value, len(named))
            return named[value][1]
        before, after = form[: place.start()].rstrip()[-1:], form[place.end() :][:1]
        is_whole = before in ("", *"([,=") and after in ("", *")],")
        return site.text(value) if is_whole or isinstance(value, _ATOMS) else f"({site.text(value)})"

    try:
        text = _picked(site, _PLACES.sub(replaced, form), binding.picks)
        operation, is_in_place = operation_of(node, site), re.fullmatch("[a-z].*_", called_name(node))
        if operation is not None and is_in_place and "W" not in binding.letters:
            changed = operation.args[0]  # which others may see, if it has a name
            text = f"{site.text(changed)}.copy_({text})" if isinstance(changed, _NAMED) else text
        edit = placed(site, node, text)
    except (LookupError, SyntaxError):  # a form may ask a number for its attributes
        return ()
    return *(naming for naming, _ in named.values()), edit


def _picked(site: Site, text: str, picks: Sequence[ast.AST]) -> str:
    """Return the text of the operations that pick elements, with an expression in the place of what they pick from."""
    for node in reversed(picks):
        operation, (start, end) = operation_of(node, site), site.file.span(node)
        assert operation is not None
        old = site.file.span(operation.args[0])
        text = site.file.part(Span(start, old.start)) + text + site.file.part(Span(old.end, end))
    return text


def _named(site: Site, value: ast.expr, number: int) -> tuple[Edit, str]:
    """Return the edit that names an expression where it is computed, and the name; LookupError if none is free."""
    known = {getattr(x, "id", getattr(x, "arg", "")) for x in ast.walk(site.node)} | site.globals.keys()
    name = [x for x in ("logits", "scores", "operand") if x not in known][number]
    span, text = site.file.span(value), f"{name} := {site.text(value)}"
    is_bare = isinstance(site.parents.get(value), ast.Call) or site.file.bracketed(span) != span
    return Edit(span, text if is_bare else f"({text})"), name


def placed(site: Site, node: ast.AST, text: str) -> Edit:
    """Return the edit that puts an expression in the place of a node, in brackets where it needs them."""
    above, span = site.parents.get(node), site.file.span(node)
    bracketed = site.file.bracketed(span)
    if isinstance(ast.parse(f"({text})", mode="eval").body, _ATOMS):
        is_argument = isinstance(above, ast.Call | ast.keyword | ast.Tuple | ast.List)
        return Edit(span if is_argument else bracketed, text)
    around = ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Subscript | ast.Compare | ast.IfExp
    is_operand = isinstance(above, around) or (isinstance(above, ast.Call) and above.func is node)
    needs = (is_operand or "\n" in text) and bracketed == span
    return Edit(span, f"({text})" if needs else text)
