"""Expressions of a statement as a rule sees them: operations by name, whichever way they are spelt."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .source_file import Edit, SourceFile, Span

if TYPE_CHECKING:
    from .code_swap import Target

_OPERATORS: dict[type[ast.operator], str] = {
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
    """The statement with the failing operation, in the function that runs it."""

    def __init__(self, target: Target, line: int) -> None:
        self.target = target
        self.file: SourceFile = target.file
        self.line = line
        statement = self.file.statement(line)
        self.statement: ast.AST = target.node if statement is None else statement
        self._parents = {
            child: parent for parent in ast.walk(target.node) for child in ast.iter_child_nodes(parent)
        }

    def expressions(self) -> Iterator[Spelt]:
        """Yield the operations of the statement that cover the line, outer first."""
        for node in ast.walk(self.statement):
            if not isinstance(node, ast.AugAssign | ast.expr):
                continue
            is_there = node.lineno <= self.line <= (node.end_lineno or node.lineno)
            if is_there and (spelt := self.spelt(node)) is not None:
                yield spelt

    def spelt(self, node: ast.AST) -> Spelt | None:
        """The operation that the node is, None for what is none."""
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return Spelt(node, _OPERATORS[type(node.op)], (node.left, node.right), {})
        if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
            return Spelt(node, _OPERATORS[type(node.op)], (node.target, node.value), {})
        if not isinstance(node, ast.Call) or any(isinstance(one, ast.Starred) for one in node.args):
            return None
        kwargs = {one.arg: one.value for one in node.keywords if one.arg}
        args = tuple(node.args)
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if not isinstance(self.constant(node.func.value), ModuleType):
                args = (node.func.value, *args)
        elif isinstance(node.func, ast.Name):
            name = node.func.id
        else:
            return None
        name = name.removesuffix("_")
        if name in _OPERATORS.values() and len(args) < 2:
            return None  # its second operand is given by name
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        return Spelt(node, _ALIASES.get(name, name), args, kwargs) if args else None

    def constant(self, node: ast.AST) -> Any:
        """The module or number that a global name, or an attribute of one, stands for; else None."""
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

    def definition(self, node: ast.AST) -> ast.expr | None:
        """The value of a local name's last plain assignment before the statement, where there is one."""
        if not isinstance(node, ast.Name):
            return None
        before = [
            one
            for one in ast.walk(self.target.node)
            if isinstance(one, ast.Assign)
            and (one.end_lineno or one.lineno) < self.line
            and any(isinstance(x, ast.Name) and x.id == node.id for t in one.targets for x in ast.walk(t))
        ]
        last = max(before, key=lambda one: one.lineno, default=None)
        plain = last is not None and len(last.targets) == 1 and isinstance(last.targets[0], ast.Name)
        return last.value if last is not None and plain else None

    def definitions(self) -> list[int]:
        """The lines of the plain assignments before the statement that made the local values it names."""
        found = (self.definition(node) for node in ast.walk(self.statement) if isinstance(node, ast.Name))
        return list(dict.fromkeys(one.lineno for one in found if one is not None))

    def meaning(self, node: ast.expr) -> Spelt | None:
        """The operation that the node is, or that made the local value it names."""
        return self.spelt(self.definition(node) or node)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node around this one."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The expressions around this one, the nearest first."""
        above = self.parent(node)
        while isinstance(above, ast.expr | ast.keyword):
            yield above
            above = self.parent(above)

    # Text

    def span(self, node: ast.AST) -> Span:
        """The span of a node, with its brackets where they belong to it and not to a call."""
        span = self.file.span(node)
        above = self.parent(node)
        is_argument = isinstance(above, ast.Call) and node is not above.func
        is_listed = isinstance(above, ast.keyword | ast.Tuple)
        return span if is_argument or is_listed else self.file.bracketed(span)

    def text(self, node: ast.AST) -> str:
        """The text of a node, without brackets around it."""
        return self.file.part(self.file.span(node))

    def primary(self, node: ast.expr) -> str:
        """The text of a node as what an attribute can follow."""
        text = self.text(node)
        is_primary = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        return text if is_primary else f"({text})"

    def operand(self, node: ast.expr) -> str:
        """The text of a node as what can stand in an arithmetic expression."""
        text = self.text(node)
        is_atom = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
        return text if is_atom else f"({text})"

    def module(self, module: ModuleType, dotted: str) -> str:
        """The name of a module in this file: an alias, or the dotted one where its root is there; else ""."""
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
