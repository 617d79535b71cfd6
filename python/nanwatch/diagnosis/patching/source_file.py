"""A source file as text and syntax tree: its expressions, edits of them, and the patch that an edit is."""

from __future__ import annotations

import ast
import difflib
import linecache
import tokenize
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Larger ones are generated, and parsing them takes seconds.
_MOST_BYTES = 4 << 20


class Span(NamedTuple):
    """The bytes of a part of a source text, encoded as UTF-8."""

    start: int
    end: int

    def covers(self, other: Span) -> bool:
        """Whether the other lies inside this one."""
        return self.start <= other.start and other.end <= self.end


class Edit(NamedTuple):
    """A part of a source text and what takes its place."""

    span: Span
    text: str


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
        """The span of a node that has a place."""
        places = ("lineno", "col_offset", "end_lineno", "end_col_offset")
        return self.between(*(getattr(node, name) for name in places))

    def between(self, line: int, column: int, end_line: int, end_column: int) -> Span:
        """The span between two places; columns are in bytes."""
        return Span(self._starts[line - 1] + column, self._starts[end_line - 1] + end_column)

    def line_of(self, span: Span) -> int:
        """The number of the line in which the span begins."""
        return bisect_right(self._starts, span.start)

    def bracketed(self, span: Span) -> Span:
        """The span with the round brackets directly around it, if there is a pair; else the same."""
        before, after = self._data[: span.start].rstrip(b" "), self._data[span.end :]
        gap = len(after) - len(after.lstrip(b" "))
        if before.endswith(b"(") and after[gap : gap + 1] == b")":
            return Span(len(before) - 1, span.end + gap + 1)
        return span

    def part(self, span: Span) -> str:
        """The text of a span."""
        return self._data[span.start : span.end].decode()

    def statement(self, line: int) -> ast.stmt | None:
        """The innermost statement that covers the line."""
        found: ast.stmt | None = None
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
                continue
            if found is None or self.span(found).covers(self.span(node)):
                found = node
        return found

    def edited(self, edits: Sequence[Edit]) -> SourceFile:
        """The file with these edits, which do not overlap."""
        data = self._data
        for span, text in sorted(edits, reverse=True):
            data = data[: span.start] + text.encode() + data[span.end :]
        return SourceFile(self.name, data.decode(), is_file=self.is_file, ending=self._ending)

    @staticmethod
    def moved(span: Span, edits: Sequence[Edit]) -> Span:
        """The span in the edited text of what is at `span` in this one, which covers an edit or does not touch it."""
        start = span.start + sum(_growth(one) for one in edits if one.span.end <= span.start)
        inside = sum(_growth(one) for one in edits if span.covers(one.span))
        return Span(start, start + span.end - span.start + inside)

    def patch(self, after: SourceFile) -> str:
        """A unified diff from this file to the other version, "" where nothing is on the disk."""
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
    """The path from the top of its git work tree, else from the current folder, else from its own."""
    for folder in path.parents:
        if (folder / ".git").exists():
            return path.relative_to(folder).as_posix()
    here = Path.cwd()
    return (path.relative_to(here) if path.is_relative_to(here) else Path(path.name)).as_posix()
