"""Source as text and syntax tree: a file and its edits, and the operations of a statement by name, however spelt."""

from __future__ import annotations

import ast
import difflib
import linecache
import tokenize
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# Larger ones are generated, and parsing them takes seconds.
_MOST_BYTES = 4 << 20


class Span(NamedTuple):
    """The bytes of a part of a source text, encoded as UTF-8."""

    start: int
    end: int

    def covers(self, other: Span) -> bool:
        """Return whether the other lies inside this one."""
        return self.start <= other.start and other.end <= self.end


class Edit(NamedTuple):
    """A part of a source text and what takes its place."""

    span: Span
    text: str


def first_line(node: ast.stmt | ast.expr) -> int:
    """Return the first line of a node, that of its first decorator if it has one."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def nodes_at(tree: ast.Module, line: int) -> Iterator[ast.AST]:
    """Yield the statements that cover the line, with their expressions, outer ones first.

    A walk over the whole tree took 5 ms for a file of 2,000 lines, and a search makes one for each change.
    """
    left: deque[ast.AST] = deque([tree])
    while left:
        node = left.popleft()
        if isinstance(node, ast.stmt) and not first_line(node) <= line <= (node.end_lineno or node.lineno):
            continue
        yield node
        left.extend(ast.iter_child_nodes(node))


class SourceFile:
    """The text of a Python file and its tree. Raises SyntaxError where it is no Python."""

    def __init__(self, name: str, text: str, *, is_file: bool, ending: str = "\n") -> None:
        self.name = name
        self.text = text
        self.is_file = is_file
        self.tree = ast.parse(text)
        self._ending = ending
        self._data = text.encode()
        self._starts = [0]
        for line in self._data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    @classmethod
    def load(cls, name: str) -> SourceFile | None:
        """Return the file of that name, or the notebook cell that linecache has; None where neither can be had."""
        path = Path(name)
        try:
            if path.is_file():
                if path.stat().st_size > _MOST_BYTES:
                    return None
                with tokenize.open(name) as file:
                    text = file.read()
                    newlines = file.newlines
                return cls(name, text, is_file=True, ending=newlines if isinstance(newlines, str) else "\n")
            text = "".join(linecache.getlines(name))
            return cls(name, text, is_file=False) if text else None
        except (OSError, SyntaxError, ValueError):
            return None

    def span(self, node: ast.AST) -> Span:
        """Return the span of a node that has a place."""
        places = ("lineno", "col_offset", "end_lineno", "end_col_offset")
        return self.between(*(getattr(node, name) for name in places))

    def between(self, line: int, column: int, end_line: int, end_column: int) -> Span:
        """Return the span between two places; columns are in bytes."""
        return Span(self._starts[line - 1] + column, self._starts[end_line - 1] + end_column)

    def at(self, positions: Sequence[int | None] | None) -> Span | None:
        """Return the span of what `code.co_positions()` has of an instruction; None where it does not tell."""
        known = [one for one in positions or () if one is not None]
        if len(known) != 4:
            return None
        line, end_line, start, end = known
        return self.between(line, start, end_line, end)

    def line_of(self, span: Span) -> int:
        """Return the number of the line in which the span begins."""
        return bisect_right(self._starts, span.start)

    def bracketed(self, span: Span) -> Span:
        """Return the span with the round brackets directly around it, if there is a pair; else the same."""
        before, after = self._data[: span.start].rstrip(b" "), self._data[span.end :]
        gap = len(after) - len(after.lstrip(b" "))
        if before.endswith(b"(") and after[gap : gap + 1] == b")":
            return Span(len(before) - 1, span.end + gap + 1)
        return span

    def part(self, span: Span) -> str:
        """Return the text of a span."""
        return self._data[span.start : span.end].decode()

    def statement(self, line: int) -> ast.stmt | None:
        """Return the innermost statement that covers the line."""
        found: ast.stmt | None = None
        for node in nodes_at(self.tree, line):
            if not isinstance(node, ast.stmt) or node.lineno > line:
                continue
            if found is None or self.span(found).covers(self.span(node)):
                found = node
        return found

    def edited(self, edits: Sequence[Edit]) -> SourceFile:
        """Return the file with these edits, which do not overlap."""
        data = self._data
        for span, text in sorted(edits, reverse=True):
            data = data[: span.start] + text.encode() + data[span.end :]
        return SourceFile(self.name, data.decode(), is_file=self.is_file, ending=self._ending)

    @staticmethod
    def moved(span: Span, edits: Sequence[Edit]) -> Span:
        """Return the span in the edited text of what is at `span` in this one, which covers an edit or does not touch
        it.
        """
        start = span.start + sum(_growth(one) for one in edits if one.span.end <= span.start)
        inside = sum(_growth(one) for one in edits if span.covers(one.span))
        return Span(start, start + span.end - span.start + inside)

    def patch(self, after: SourceFile) -> str:
        """Return a unified diff from this file to the other version, "" where nothing is on the disk."""
        if not self.is_file:
            return ""
        path = _relative(Path(self.name).resolve())
        diff = difflib.unified_diff(self._lines(), after._lines(), f"a/{path}", f"b/{path}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff
        )

    def _lines(self) -> list[str]:
        *whole, rest = self.text.split("\n")
        return [line + self._ending for line in whole] + ([rest] if rest else [])


def _growth(edit: Edit) -> int:
    return len(edit.text.encode()) - (edit.span.end - edit.span.start)


def _relative(path: Path) -> str:
    """Return the path from the top of its git work tree, else from the current folder, else from its own."""
    for folder in path.parents:
        if (folder / ".git").exists():
            return path.relative_to(folder).as_posix()
    here = Path.cwd()
    return (path.relative_to(here) if path.is_relative_to(here) else Path(path.name)).as_posix()


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
    "arccosh": "acosh",
    "clip": "clamp",
    "float_power": "pow",
    "vector_norm": "norm",
}


class Target(NamedTuple):
    """The functions that run a line, which share one code, and the file that they were compiled from.

    Statements without a function of their own have the node of what is around them, and `exchange` runs an edited file
    in their place.
    """

    functions: tuple[FunctionType, ...]
    file: SourceFile
    node: FunctionNode | ast.Module
    exchange: Callable[[SourceFile, Sequence[Span], Any], AbstractContextManager[None]] | None = None

    @property
    def code(self) -> CodeType:
        """The code as it is now."""
        return self.functions[0].__code__

    @property
    def names(self) -> dict[str, Any]:
        """The globals of the functions."""
        return self.functions[0].__globals__


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
        """Return the operation that the node is, or None."""
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
            # `self.softmax(x)` calls a module.
            is_own = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
            if not is_own and not isinstance(self.constant(node.func.value), ModuleType):
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

    def definition(self, node: ast.AST) -> ast.expr | None:
        """Return the value of a local name's last plain assignment before the statement, where there is one."""
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

    def num_uses(self, node: ast.AST) -> int:
        """Return how often the function reads the local value that the node names; 0 for another node."""
        name = node.id if isinstance(node, ast.Name) else ""
        names = (one for one in ast.walk(self.target.node) if isinstance(one, ast.Name))
        return sum(one.id == name and isinstance(one.ctx, ast.Load) for one in names)

    def definitions(self) -> list[int]:
        """Return the lines of the plain assignments before the statement that made the local values it names."""
        found = (self.definition(node) for node in ast.walk(self.statement) if isinstance(node, ast.Name))
        return list(dict.fromkeys(one.lineno for one in found if one is not None))

    def meaning(self, node: ast.expr) -> Spelt | None:
        """Return the operation that the node is, or that made the local value it names."""
        return self.spelt(self.definition(node) or node)

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
