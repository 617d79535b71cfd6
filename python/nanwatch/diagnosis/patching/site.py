"""The statement that failed: its operations by name, however they are spelt, and the texts that may replace them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .source import Edit, SourceFile, Span, Target, all_names, is_self

OPERATORS: dict[type[ast.operator], str] = {
    ast.Div: "div",
    ast.Pow: "pow",
    ast.Mult: "mul",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.MatMult: "matmul",
}
_ALIASES = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "arccos": "acos",
    "arcsin": "asin",
    "arctanh": "atanh",
    "arccosh": "acosh",
    "clip": "clamp",
    "float_power": "pow",
    "vector_norm": "norm",
}


class Spelt(NamedTuple):
    """An operation in the source: its name, its operands, and its keyword arguments.

    The first operand of a method is the object that has it.
    """

    node: ast.AST
    name: str
    args: tuple[ast.expr, ...]
    kwargs: dict[str, ast.expr]


class Rewrite(NamedTuple):
    """A node, the text that takes its place, and what that does in words."""

    node: ast.AST
    text: str
    words: str


class Change(NamedTuple):
    """A proposed change: the edits, what it does in words, and the expressions whose values show its effect.

    `is_stable`: it computes the same, with less rounding.
    """

    edits: tuple[Edit, ...]
    words: str
    looks: tuple[Span, ...]
    is_stable: bool = False


class Site:
    """The statement with the failing operation, in the function that runs it.

    `position` is of the failing expression, which says which of several statements on the line has it.
    """

    def __init__(self, target: Target, line: int, position: Span | None = None) -> None:
        self.target = target
        self.file: SourceFile = target.file
        self.line = line
        there = self.file.statements(line)
        if position is not None:
            there = [one for one in there if self.file.span(one).covers(position)] or there
        several = ast.Module(list(there), [])
        self.statement: ast.AST = there[0] if len(there) == 1 else several if there else target.node
        self._start = min((self.file.span(one).start for one in there), default=0)
        self._parents = {
            child: parent for parent in ast.walk(target.node) for child in ast.iter_child_nodes(parent)
        }
        self._bindings: dict[str, list[tuple[int, ast.expr | None]]] = {}
        for node in self._parents:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                above = self._parents[node]
                plain = isinstance(above, ast.Assign) and len(above.targets) == 1
                value = above.value if isinstance(above, ast.Assign) and plain else None
                end = self.file.span(node if value is None else above).end
                self._bindings.setdefault(node.id, []).append((end, value))
        for found in self._bindings.values():
            found.sort(key=lambda one: one[0])

    @property
    def value(self) -> ast.expr | None:
        """The expression that the statement evaluates: what it returns or assigns, or the body of a lambda."""
        if isinstance(self.target.node, ast.Lambda):
            return self.target.node.body
        is_plain = isinstance(self.statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr)
        return self.statement.value if is_plain else None  # type: ignore[attr-defined]

    def expressions(self, *, whole: bool = False) -> Iterator[Spelt]:
        """Yield the operations of the statement that cover the line, or all with `whole`, outer first."""
        for node in ast.walk(self.statement):
            if not isinstance(node, ast.AugAssign | ast.expr) or node not in self._parents:
                continue
            is_there = whole or node.lineno <= self.line <= (node.end_lineno or node.lineno)
            if is_there and (spelt := self.spelt(node)) is not None:
                yield spelt

    def covers(self, node: ast.expr) -> bool:
        """Return whether the node is a part of the statement, and not of what made one of its names."""
        return any(one is node for one in ast.walk(self.statement))

    def spelt(self, node: ast.AST) -> Spelt | None:
        """Return the operation that the node is, or None."""
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return Spelt(node, OPERATORS[type(node.op)], (node.left, node.right), {})
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            return Spelt(node, OPERATORS[type(node.op)], (node.target, node.value), {})
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return Spelt(node, "neg", (node.operand,), {})
        if not isinstance(node, ast.Call) or any(isinstance(one, ast.Starred) for one in node.args):
            return None
        kwargs = {one.arg: one.value for one in node.keywords if one.arg}
        args = tuple(node.args)
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            # `self.softmax(x)` calls a module.
            if not is_self(node.func.value) and not isinstance(self.constant(node.func.value), ModuleType):
                args = (node.func.value, *args)
        elif isinstance(node.func, ast.Name):
            name = node.func.id
        else:
            return None
        name = name.removesuffix("_")
        if name in OPERATORS.values() and len(args) < 2:
            return None  # its second operand is given by name
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        return Spelt(node, _ALIASES.get(name, name), args, kwargs) if args else None

    def constant(self, node: ast.AST) -> Any:
        """Return the module or number that a global name, or an attribute of one, stands for; else None."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int | float) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.constant(node.operand)
            return -value if isinstance(value, int | float) else None
        if isinstance(node, ast.Name):
            value = self.target.names.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(owner := self.constant(node.value), ModuleType):
            value = getattr(owner, node.attr, None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float":
            text = node.args[0] if len(node.args) == 1 else None
            try:
                value = float(text.value) if isinstance(text, ast.Constant) else None  # type: ignore[arg-type]
            except ValueError:
                value = None
        else:
            return None
        return value if isinstance(value, int | float | ModuleType) else None

    def called(self, node: ast.AST) -> Any:
        """Return the function of torch or of the file that a call runs, or the method of a tensor; None where unknown.

        The call of a module is none of these.
        """
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Name):
            value = self.target.names.get(function.id)
            return value if callable(value) and not isinstance(value, torch.nn.Module) else None
        if not isinstance(function, ast.Attribute):
            return None
        owner = self.constant(function.value)
        if isinstance(owner, ModuleType):
            return getattr(owner, function.attr, None)
        return None if is_self(function.value) else getattr(torch.Tensor, function.attr, None)

    def may_have(self, node: ast.expr, name: str) -> bool:
        """Return whether what the node names may have an attribute: unknown only where it is one of `self`."""
        if isinstance(node, ast.Name):
            made = self.definition(node)
            kind = self.called(made) if made is not None else type(self.target.names.get(node.id))
            return isinstance(kind, type) and name in getattr(kind, "__constants__", ())
        return isinstance(node, ast.Attribute)

    def definition(self, node: ast.AST) -> ast.expr | None:
        """Return the value of a local name's last binding before the statement, if that is a plain assignment."""
        return self._last_binding(node.id)[1] if isinstance(node, ast.Name) else None

    def written_out(self, node: ast.expr) -> ast.expr:
        """Return what may stand for a local name in the statement: its definition, where all in that is unchanged."""
        if not isinstance(node, ast.Name):
            return node
        made, value = self._last_binding(node.id)
        if value is None or any(self._last_binding(x)[0] >= made for x in all_names(value)):
            return node
        return value

    def _last_binding(self, name: str) -> tuple[int, ast.expr | None]:
        found = self._bindings.get(name, ())
        return next((one for one in reversed(found) if one[0] <= self._start), (-1, None))

    def num_uses(self, node: ast.AST) -> int:
        """Return how often the function reads the local value that the node names; 0 for another node."""
        name = node.id if isinstance(node, ast.Name) else ""
        names = (one for one in ast.walk(self.target.node) if isinstance(one, ast.Name))
        return sum(one.id == name and isinstance(one.ctx, ast.Load) for one in names)

    def definitions(self) -> list[int]:
        """Return the lines of the plain assignments before the statement that made the local values it names."""
        found = (self.definition(node) for node in ast.walk(self.statement) if isinstance(node, ast.Name))
        return list(dict.fromkeys(one.lineno for one in found if one is not None))

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node around this one."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Return the expressions around this one, the nearest first."""
        above = self.parent(node)
        while isinstance(above, ast.expr | ast.keyword):
            yield above
            above = self.parent(above)

    # Text

    def span(self, node: ast.AST) -> Span:
        """Return the span of a node, with its brackets where they belong to it and not to a call."""
        span = self.file.span(node)
        above = self.parent(node)
        is_argument = isinstance(above, ast.Call) and node is not above.func
        is_listed = isinstance(above, ast.keyword | ast.Tuple)
        return span if is_argument or is_listed else self.file.bracketed(span)

    def text(self, node: ast.AST) -> str:
        """Return the text of a node, without brackets around it."""
        return self.file.part(self.file.span(node))

    def primary(self, node: ast.expr) -> str:
        """Return the text of a node in a form that an attribute can follow."""
        text = self.text(node)
        is_primary = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        return text if is_primary else f"({text})"

    def operand(self, node: ast.expr) -> str:
        """Return the text of a node in a form that can stand in an arithmetic expression."""
        text = self.text(node)
        is_atom = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
        return text if is_atom else f"({text})"

    def module(self, module: ModuleType, dotted: str) -> str:
        """Return the name of a module in this file: an alias, or the dotted one where its root is there; else ""."""
        names = self.target.names
        if alias := next((name for name, value in names.items() if value is module), ""):
            return alias
        return dotted if isinstance(names.get(dotted.split(".")[0]), ModuleType) else ""

    @property
    def torch(self) -> str:
        """The name of torch in this file."""
        return self.module(torch, "torch")

    @property
    def functional(self) -> str:
        """The name of torch.nn.functional in this file."""
        nn = next((name for name, value in self.target.names.items() if value is torch.nn), "")
        return self.module(torch.nn.functional, f"{nn}.functional" if nn else "torch.nn.functional")
