"""Source of the functions that a trial changes: its text and syntax tree, and edited code in a function's place.

The edited function is compiled from its whole file. In the place of the function's own code comes one that calls the
edited function in the thread of the trial, and the old one in all others.
"""

from __future__ import annotations

import ast
import copy
import difflib
import inspect
import linecache
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ...instrumentation.execution_context import is_of_thread
from ...numerics._extension import instances_of
from ..batch_snapshot import members_of
from ..causes import tensors_in
from ..provenance import Expression

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# What ends a line of Python; git knows the first two.
_LINE_END = re.compile(rb"\r\n|\n|\r")
# Stands in compiled code for the object that takes its place among the constants.
_STAND_IN = "nanwatch.diagnosis.patching.source"
# A probe keeps no larger values, and only the first evaluations of an expression in a loop.
_MOST_ELEMENTS = 1 << 24
_MOST_KEPT = 16


class Span(NamedTuple):
    """The bytes of a part of a source text, encoded as UTF-8."""

    start: int
    end: int

    def covers(self, span: Span) -> bool:
        """Return whether `span` lies inside this one."""
        return self.start <= span.start and span.end <= self.end


class Edit(NamedTuple):
    """A part of a source text and what takes its place."""

    span: Span
    text: str


class SourceFile:
    """The text of a Python file, with its own line ends, and its tree. Raises SyntaxError where it is no Python."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.is_file = Path(name).is_file()
        self.tree = ast.parse(text)
        self._data = text.encode()
        self._starts = [0, *(match.end() for match in _LINE_END.finditer(self._data))]

    @classmethod
    def load(cls, name: str) -> SourceFile | None:
        """Return the UTF-8 file of that name, or the notebook cell that linecache has; None without either."""
        path = Path(name)
        try:
            text = path.read_bytes().decode() if path.is_file() else "".join(linecache.getlines(name))
            return cls(name, text) if text else None
        except (OSError, SyntaxError, ValueError):
            return None

    def span(self, node: Any) -> Span:
        """Return the span of a node that has a place."""
        return self._between(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)

    def at(self, positions: Sequence[int | None] | None) -> Span | None:
        """Return the span of what `code.co_positions()` has of an instruction; None where it does not tell."""
        known = [place for place in positions or () if place is not None]
        return self._between(*known) if len(known) == 4 else None

    def _between(self, line: int, end_line: int, column: int, end_column: int) -> Span:
        return Span(self._starts[line - 1] + column, self._starts[end_line - 1] + end_column)

    def line_of(self, span: Span) -> int:
        """Return the number of the line in which the span begins."""
        return sum(start <= span.start for start in self._starts)

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

    def edited(self, edits: Sequence[Edit]) -> SourceFile:
        """Return the file with these edits, which do not overlap."""
        data = self._data
        for span, text in sorted(edits, reverse=True):
            data = data[: span.start] + text.encode() + data[span.end :]
        return SourceFile(self.name, data.decode())

    def patch(self, after: SourceFile) -> str:
        """Return a unified diff from this file to the other version; "" where nothing is on the disk."""
        if not self.is_file:
            return ""
        path = _relative(Path(self.name).resolve())
        if " " in path:
            path += "\t"  # ends a name with spaces in it
        # Lines as git has them, which knows no other end than a line feed.
        before, changed = (re.findall(r"[^\n]*\n|[^\n]+", file.text) for file in (self, after))
        lines = difflib.unified_diff(before, changed, f"a/{path}", f"b/{path}")
        return "".join(x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in lines)


def moved(span: Span, edits: Sequence[Edit]) -> Span:
    """Return the span in the edited text of what is at `span`, which covers an edit or does not touch it."""
    start, end = span
    for place, text in edits:
        growth = len(text.encode()) - (place.end - place.start)
        start += growth if place.end <= span.start else 0
        end += growth if place.end <= span.start or span.covers(place) else 0
    return Span(start, end)


def _relative(path: Path) -> str:
    """Return the path from the top of its git work tree, else from the current folder, else from its own."""
    tops = [folder for folder in path.parents if (folder / ".git").exists()]
    top = next((x for x in (*tops, Path.cwd()) if path.is_relative_to(x)), path.parent)
    return path.relative_to(top).as_posix()


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


def functions_in(tree: ast.AST) -> list[FunctionNode]:
    """Return all functions in a tree, the outer ones first."""
    return [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]


def node_of(file: SourceFile, code: CodeType) -> FunctionNode | ast.Module | None:
    """Return the only node that the code can be compiled from, by its name and line."""
    if code.co_name == "<module>":
        return file.tree
    nodes = [
        node
        for node in functions_in(file.tree)
        if first_line(node) == code.co_firstlineno and getattr(node, "name", "<lambda>") == code.co_name
    ]
    return nodes[0] if len(nodes) == 1 else None


# Functions, and other code in their place


class Probe:
    """Keeps copies of the values of expressions of the edited code by their number, as they are evaluated."""

    def __init__(self) -> None:
        self.values: dict[int, list[Any]] = {}

    def seen(self, value: Any, number: int) -> Any:
        """Keep the tensors of a value, or the number that it is, and return it."""
        kept = self.values.setdefault(number, [])
        if len(kept) < _MOST_KEPT:
            kept += [x.detach().clone() for x in tensors_in(value) if x.numel() <= _MOST_ELEMENTS]
            if isinstance(value, int | float) and not isinstance(value, bool):
                kept.append(value)
        return value


class Target(NamedTuple):
    """The functions that run a line, which share one code, and the file that they were compiled from.

    Statements without a function of their own have the node of what is around them, and `exchange` runs an edited file
    in their place.
    """

    functions: tuple[FunctionType, ...]
    file: SourceFile
    node: FunctionNode | ast.Module
    exchange: Callable[[SourceFile, Sequence[Span], Probe], AbstractContextManager[None]] | None = None

    def node_in(self, tree: ast.Module) -> FunctionNode | ast.Module:
        """Return its node in the tree of an edited file. Raises ValueError where that is not known."""
        if isinstance(self.node, ast.Module):
            return tree
        before, after = functions_in(self.file.tree), functions_in(tree)
        if len(before) != len(after):
            raise ValueError("the edit moved the function")
        return after[before.index(self.node)]


# Finds what runs the code of a place, or says why nothing can be put there.
TargetFinder = Callable[[Expression], Target | str]


def find_target(place: Expression) -> Target | str:
    """Return the functions that run the code of a place, or why there is none to exchange."""
    file = SourceFile.load(place.filename)
    if file is None:
        return f"the source of {place.filename} is not at hand"
    functions = [] if place.code is None else _functions_with(place.code, place.filename)
    if not functions:
        return "the line belongs to no function that could be exchanged"
    code = functions[0].__code__
    if code not in _compiled(file.tree, file, code, code.co_firstlineno):
        words = "is not what runs: it was edited since it was imported, or rewritten on import"
        return f"{place.filename} {words}"
    node = node_of(file, code)
    if node is None:
        return f"several functions begin on line {code.co_firstlineno}, and which of them failed is not known"
    return Target(tuple(functions), file, node)


def _functions_with(code: CodeType, filename: str) -> list[FunctionType]:
    """Return the functions of this code; of a comprehension, or a function that is gone, those around it."""
    members = members_of(x for x in list(sys.modules.values()) if getattr(x, "__file__", None) == filename)
    # The garbage collector does not know objects after gc.freeze(): a module and its classes name most of these.
    named = (inspect.unwrap(x) for x in members if type(x) is FunctionType)
    known = {id(x): x for x in (*named, *instances_of(FunctionType)) if type(x) is FunctionType}
    of_file = [x for x in known.values() if x.__code__.co_filename == filename]
    functions = [x for x in of_file if code in _codes(x.__code__)]
    innermost = max((x.__code__ for x in functions), key=lambda x: x.co_firstlineno, default=None)
    return [x for x in functions if x.__code__ is innermost]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code, and those of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _compiled(tree: ast.Module, file: SourceFile, code: CodeType, line: int) -> list[CodeType]:
    """Return the codes of the name of `code` that begin on that line, compiled as it was.

    IPython compiles each statement of a cell by itself, with the future statements of earlier cells. A method of a name
    that the same unit has imported, such as torch.log, is then called by other instructions.
    """
    units = [tree] if file.is_file else [ast.Module([statement], []) for statement in tree.body]
    flags = code.co_flags & annotations.compiler_flag
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [compile(unit, file.name, "exec", flags, dont_inherit=True) for unit in units]
    codes = (inner for module in modules for inner in _codes(module))
    return [inner for inner in codes if (inner.co_name, inner.co_firstlineno) == (code.co_name, line)]


@contextmanager
def exchanged(target: Target, file: SourceFile, looks: Sequence[Span], probe: Probe) -> Iterator[None]:
    """Let calls of the target in this thread run the code of the edited `file`, for the block.

    `looks` are spans in that file: the probe is given the value of the outermost expression inside each. Raises
    ValueError where the edited function cannot take the other's place.
    """
    before = target.functions[0].__code__
    # A tree to change; a copy of the file's takes 5 times as long.
    tree = ast.fix_missing_locations(_Looks(file, looks).visit(ast.parse(file.text)))
    node = target.node_in(tree)
    assert isinstance(node, FunctionNode)
    code, *_ = _compiled(tree, file, before, first_line(node))
    code = _with_constant(code, probe)
    try:
        for function in target.functions:
            function.__code__ = _branch(function, code)
        yield
    finally:
        for function in target.functions:
            function.__code__ = before


def compiled_with(tree: ast.Module, file: SourceFile, looks: Sequence[Span], probe: Probe) -> CodeType:
    """Return the code of statements of the file, which gives the probe the values of the expressions at `looks`."""
    tree = _Looks(file, looks).visit(copy.deepcopy(tree))  # the file's own stays as it is
    flags = annotations.compiler_flag  # a function evaluates none
    code = compile(ast.fix_missing_locations(tree), file.name, "exec", flags, dont_inherit=True)
    return _with_constant(code, probe)


def _branch(function: FunctionType, code: CodeType) -> CodeType:
    """Return code for the place of the function's own, which runs `code` in this thread, and the own in all others."""
    owner, names = threading.get_ident(), (function.__globals__, function.__name__)
    values = function.__defaults__, function.__closure__
    edited, before = (FunctionType(x, *names, *values) for x in (code, function.__code__))
    edited.__kwdefaults__ = before.__kwdefaults__ = function.__kwdefaults__

    def call(*args: Any, **kwargs: Any) -> Any:
        return (edited if is_of_thread(owner) else before)(*args, **kwargs)

    return _with_constant(_branching.__code__, call).replace(co_freevars=code.co_freevars)


def _branching(*args: Any, **kwargs: Any) -> Any:
    return "nanwatch.diagnosis.patching.source".__call__(*args, **kwargs)  # type: ignore[operator]


def _with_constant(code: CodeType, value: Any) -> CodeType:
    return code.replace(
        co_consts=tuple(
            _with_constant(x, value) if isinstance(x, CodeType) else value if x == _STAND_IN else x
            for x in code.co_consts
        )
    )


class _Looks(ast.NodeTransformer):
    """Transformer that gives the probe the value of the outermost expression inside each span."""

    def __init__(self, file: SourceFile, spans: Sequence[Span]) -> None:
        self._file, self._spans = file, dict(enumerate(spans))

    def visit(self, node: Any) -> Any:
        numbers: list[int] = []
        is_value = isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if is_value and hasattr(node, "lineno"):
            span = self._file.span(node)
            numbers = [number for number, place in self._spans.items() if place.covers(span)]
        for number in numbers:
            del self._spans[number]
        node = self.generic_visit(node)
        for number in numbers:
            function = ast.Attribute(ast.Constant(_STAND_IN), "seen", ast.Load())
            call = ast.Call(function, [node, ast.Constant(number)], [])
            node = ast.copy_location(call, node)
        return node
