"""Source as text and syntax tree: a file, its edits, and its patches."""

from __future__ import annotations

import ast
import difflib
import linecache
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# Larger ones are generated, and parsing them takes seconds.
_MOST_BYTES = 4 << 20
# What ends a line of Python; git knows the first two.
_LINE_END = re.compile(rb"\r\n|\n|\r")


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

    @property
    def growth(self) -> int:
        """The number of bytes that it adds."""
        return len(self.text.encode()) - (self.span.end - self.span.start)


class SourceFile:
    """The text of a Python file, with its own line ends, and its tree. Raises SyntaxError where it is no Python."""

    def __init__(self, name: str, text: str, *, is_file: bool) -> None:
        self.name = name
        self.text = text
        self.is_file = is_file
        self.tree = ast.parse(text)
        self._data = text.encode()
        self._starts = [0, *(match.end() for match in _LINE_END.finditer(self._data))]

    @classmethod
    def load(cls, name: str) -> SourceFile | None:
        """Return the UTF-8 file of that name, or the notebook cell that linecache has; None without either."""
        path = Path(name)
        try:
            if path.is_file():
                if path.stat().st_size > _MOST_BYTES:
                    return None
                return cls(name, path.read_bytes().decode(), is_file=True)
            text = "".join(linecache.getlines(name))
            return cls(name, text, is_file=False) if text else None
        except (OSError, SyntaxError, ValueError):
            return None

    def span(self, node: ast.AST) -> Span:
        """Return the span of a node that has a place."""
        places = ("lineno", "col_offset", "end_lineno", "end_col_offset")
        return self._between(*(getattr(node, name) for name in places))

    def _between(self, line: int, column: int, end_line: int, end_column: int) -> Span:
        return Span(self._starts[line - 1] + column, self._starts[end_line - 1] + end_column)

    def at(self, positions: Sequence[int | None] | None) -> Span | None:
        """Return the span of what `code.co_positions()` has of an instruction; None where it does not tell."""
        known = [place for place in positions or () if place is not None]
        if len(known) != 4:
            return None
        line, end_line, start, end = known
        return self._between(line, start, end_line, end)

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

    def column(self, span: Span) -> str:
        """Return the text of its line before the span."""
        return self.part(Span(self._starts[self.line_of(span) - 1], span.start))

    def part(self, span: Span) -> str:
        """Return the text of a span."""
        return self._data[span.start : span.end].decode()

    def edited(self, edits: Sequence[Edit]) -> SourceFile:
        """Return the file with these edits, which do not overlap."""
        data = self._data
        for span, text in sorted(edits, reverse=True):
            data = data[: span.start] + text.encode() + data[span.end :]
        return SourceFile(self.name, data.decode(), is_file=self.is_file)

    @staticmethod
    def moved(span: Span, edits: Sequence[Edit]) -> Span:
        """Return the span in the edited text of what is at `span` in this one, which covers an edit or does not touch
        it.
        """
        start = span.start + sum(edit.growth for edit in edits if edit.span.end <= span.start)
        inside = sum(edit.growth for edit in edits if span.covers(edit.span) and edit.span.end > span.start)
        return Span(start, start + span.end - span.start + inside)

    def patch(self, after: SourceFile) -> str:
        """Return a unified diff from this file to the other version; "" where nothing is on the disk."""
        if not self.is_file:
            return ""
        path = _relative(Path(self.name).resolve())
        if " " in path:
            path += "\t"  # ends a name with spaces in it
        # Lines as git has them, which knows no other end than a line feed.
        before, changed = (re.findall(r"[^\n]*\n|[^\n]+", file.text) for file in (self, after))
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(before, changed, f"a/{path}", f"b/{path}")
        )


def _relative(path: Path) -> str:
    """Return the path from the top of its git work tree, else from the current folder, else from its own."""
    for folder in path.parents:
        if (folder / ".git").exists():
            return path.relative_to(folder).as_posix()
    here = Path.cwd()
    return (path.relative_to(here) if path.is_relative_to(here) else Path(path.name)).as_posix()


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


# Readers of a syntax tree


def first_line(node: ast.stmt | ast.expr) -> int:
    """Return the first line of a node, that of its first decorator if it has one."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def paths_to(top: ast.AST, line: int) -> Iterator[list[tuple[list[Any], ast.stmt]]]:
    """Yield the blocks down to each innermost statement on a line, each block with its statement that covers it."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        value = getattr(top, name, None)
        block: list[Any] = value if isinstance(value, list) else []
        for node in block:
            if node.lineno <= line <= node.end_lineno:
                step = [(block, node)] if isinstance(node, ast.stmt) else []
                yield from (step + path for path in list(paths_to(node, line)) or [[]])


def names_in(node: ast.AST, context: type[ast.Load | ast.Store]) -> set[str]:
    """Return the names that are read, or bound, in the node, but for those of its comprehensions."""
    targets = [x.target for x in ast.walk(node) if isinstance(x, ast.comprehension)]
    inner = {name for target in targets for name in all_names(target)}
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, context)} - inner


def all_names(node: ast.AST) -> set[str]:
    """Return all names in the node."""
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def called_name(node: ast.AST) -> str:
    """Return the name of the function or method that is called, without what is before it; "" where none is."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", "") or getattr(function, "id", "")


def is_self(node: ast.AST) -> bool:
    """Return whether this is the name of a method's own object."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
