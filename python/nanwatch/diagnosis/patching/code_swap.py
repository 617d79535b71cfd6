"""Other source for a function that exists, for the calls of one thread and for a time.

The edited function is compiled from its whole file, and its code takes the place of the function's own. It holds both
bodies, the edited one for the thread of the trial and the old one for all others.
"""

from __future__ import annotations

import ast
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ...instrumentation.slot import ExclusiveRun
from ...numerics._extension import instances_of
from ..operation import tensors_in
from .source import FunctionNode, SourceFile, Span, Target, first_line, nodes_at

# Stands for the Probe in compiled code, until the Probe itself takes its place among the constants.
_STAND_IN = "nanwatch.diagnosis.patching.code_swap.Probe"
# Larger values are not kept, and of the evaluations of one expression, as in a loop, no more than the first.
MOST_ELEMENTS = 1 << 24
_MOST_KEPT = 16
# Finds what runs a line of a file, or says why nothing can be put in its place.
TargetFinder = Callable[[str, int, tuple[int | None, ...] | None], Target | str]


class Probe:
    """Chooses the body that a call runs, and keeps copies of the values of expressions by their number."""

    def __init__(self) -> None:
        self.values: dict[int, list[Tensor]] = {}
        self.was_run = False
        self._exclusive = ExclusiveRun()

    def here(self) -> bool:
        """Return whether this call is one of the trial."""
        is_ours = self._exclusive.is_ours()
        self.was_run = self.was_run or is_ours
        return is_ours

    def seen(self, value: Any, number: int) -> Any:
        """Keep the tensors of a value, and return it."""
        kept = self.values.setdefault(number, [])
        if len(kept) < _MOST_KEPT:
            kept += [x.detach().clone() for x in tensors_in(value) if x.numel() <= MOST_ELEMENTS]
            if isinstance(value, int | float) and not isinstance(value, bool):
                kept.append(torch.tensor(value, dtype=torch.float64))
        return value


def find_target(filename: str, line: int, positions: tuple[int | None, ...] | None = None) -> Target | str:
    """Return the innermost function object that runs this line of this file, or why there is none to exchange.

    `positions` are those of the instruction that failed, as `code.co_positions()` has them.
    """
    file = SourceFile.load(filename)
    if file is None:
        return f"the source of {filename} is not at hand"
    functions = [f for f in _functions_of_module(filename) if _runs_itself(f.__code__, line)]
    if not functions:
        # In a child process gc's list of all objects copies the pages that hold them, which takes 0.1 s.
        in_file = (f for f in instances_of(FunctionType) if f.__code__.co_filename == filename)
        functions = [f for f in in_file if _runs(f.__code__, line)]
    if not functions:
        functions = [f for f in _functions_of_module(filename) if _runs(f.__code__, line)]
    if not functions:
        return "the line belongs to no function that could be exchanged"
    functions = [f for f in functions if _has(f.__code__, positions)] or functions
    code = max((f.__code__ for f in functions), key=lambda code: code.co_firstlineno)
    if not any(
        _is_same(compiled, code) for compiled in _compiled(file.tree, file, code.co_name, code.co_firstlineno)
    ):
        return f"{filename} is not what runs: it was edited since it was imported, or rewritten on import"
    node = node_of(file.tree, code)
    rivals = {f.__code__ for f in functions if f.__code__.co_firstlineno == code.co_firstlineno}
    if node is None or len(rivals) > 1:
        return f"several functions begin on line {code.co_firstlineno}, and which of them failed is not known"
    return Target(tuple(f for f in functions if f.__code__ is code), file, node)


@contextmanager
def exchanged(target: Target, file: SourceFile, looks: Sequence[Span], probe: Probe) -> Iterator[None]:
    """Let calls of the target in this thread run the code of the edited `file`, for the block.

    `looks` are spans in that file: the probe is given the value of the outermost expression inside each. Raises
    ValueError where the edited function cannot take the other's place.
    """
    if target.exchange is not None:
        with target.exchange(file, looks, probe):
            yield
        return
    before = target.code
    tree = ast.parse(file.text)  # a tree to change; a copy of the file's takes 5 times as long
    place = node_in(target, tree)
    assert isinstance(place, FunctionNode)
    assert not isinstance(target.node, ast.Module)
    for number, span in enumerate(looks):
        _Looks(file, span, number).visit(place)
    _join(place, target.node)
    ast.fix_missing_locations(place)
    compiled = _compiled(tree, file, before.co_name, first_line(place))
    code = next((c for c in compiled if _STAND_IN in c.co_consts), None)
    if code is None or code.co_freevars != before.co_freevars:
        raise ValueError("the edited function has other free variables")
    code = _with_probe(code, probe)
    try:
        for function in target.functions:
            function.__code__ = code
        yield
    finally:
        for function in target.functions:
            if function.__code__ is code:
                function.__code__ = before


def node_in(target: Target, tree: ast.Module) -> FunctionNode | ast.Module:
    """Return the node of the target in the tree of an edited file. Raises ValueError where it is not known."""
    if isinstance(target.node, ast.Module):
        return tree
    before, after = (
        [node for node in ast.walk(top) if isinstance(node, FunctionNode)] for top in (target.file.tree, tree)
    )
    if len(before) != len(after):
        raise ValueError("the edit moved the function")
    return after[before.index(target.node)]


def _functions_of_module(filename: str) -> Iterator[FunctionType]:
    """Yield the functions of this file that its module, its classes and their decorators hold."""
    modules = (x for x in list(sys.modules.values()) if getattr(x, "__file__", None) == filename)
    left = [value for module in modules for value in vars(module).values()]
    known: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if type(value) is FunctionType:
            if value.__code__.co_filename == filename:
                yield value
            # A decorator's function holds the function it wraps in a cell.
            left += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        elif issubclass(type(value), type):
            left += vars(value).values()
        elif type(value) in (staticmethod, classmethod):
            left.append(value.__func__)
        elif type(value) is property:
            left += [value.fget, value.fset]


def _runs_itself(code: CodeType, line: int) -> bool:
    return any(number == line for _, _, number in code.co_lines())


def _runs(code: CodeType, line: int) -> bool:
    return _runs_itself(code, line) or any(
        isinstance(inner, CodeType) and _runs(inner, line) for inner in code.co_consts
    )


def _has(code: CodeType, positions: tuple[int | None, ...] | None) -> bool:
    """Return whether an instruction of the code, or of a function in it, has these positions."""
    if positions is None or sys.version_info < (3, 11):
        return True
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return tuple(positions) in code.co_positions() or any(_has(x, positions) for x in inner)


def node_of(tree: ast.Module, code: CodeType) -> FunctionNode | None:
    """Return the only node that the code can be compiled from, by name, line, and columns where Python has any."""
    nodes = _nodes_of(tree, code)
    if len(nodes) > 1 and sys.version_info >= (3, 11):
        # The first instruction has the place of the line.
        places = [place for place in code.co_positions() if None not in place and place[2:] != (0, 0)]
        nodes = [node for node in nodes if all(_covers(node, *place) for place in places)]
    return nodes[0] if len(nodes) == 1 else None


def _covers(node: FunctionNode, line: int, end_line: int, column: int, end_column: int) -> bool:
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= (line, column) and (end_line, end_column) <= end


def _nodes_of(tree: ast.Module, code: CodeType) -> list[FunctionNode]:
    return [
        node
        for node in nodes_at(tree, code.co_firstlineno)
        if isinstance(node, FunctionNode)
        and first_line(node) == code.co_firstlineno
        and getattr(node, "name", "<lambda>") == code.co_name
    ]


def _compiled(tree: ast.Module, file: SourceFile, name: str, line: int) -> Iterator[CodeType]:
    """Yield the codes of that name and first line in the compiled module.

    IPython compiles each statement of a cell by itself. A method of a name that the same unit has imported, such as
    torch.log, is then called by other instructions.
    """
    units = [tree] if file.is_file else [ast.Module([statement], []) for statement in tree.body]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left: list[CodeType] = [compile(unit, file.name, "exec", dont_inherit=True) for unit in units]
    while left:
        compiled = left.pop()
        if (compiled.co_name, compiled.co_firstlineno) == (name, line):
            yield compiled
        left += [inner for inner in compiled.co_consts if isinstance(inner, CodeType)]


def _is_same(left: CodeType, right: CodeType) -> bool:
    """Return whether two codes do the same, wherever they were compiled."""
    names = ("co_code", "co_names", "co_varnames", "co_freevars")
    if any(getattr(left, name) != getattr(right, name) for name in names):
        return False
    return len(left.co_consts) == len(right.co_consts) and all(
        _is_same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else repr(a) == repr(b)
        for a, b in zip(left.co_consts, right.co_consts, strict=True)
    )


def compiled_with(tree: ast.Module, file: SourceFile, looks: Sequence[Span], probe: Probe) -> CodeType:
    """Return the code of statements of the file, which gives the probe the values of the expressions at `looks`."""
    tree = copy.deepcopy(tree)  # the file's own stays as it is
    for number, span in enumerate(looks):
        _Looks(file, span, number).visit(tree)
    code = compile(ast.fix_missing_locations(tree), file.name, "exec", dont_inherit=True)
    return _with_probe(code, probe)


def _with_probe(code: CodeType, probe: Probe) -> CodeType:
    return code.replace(
        co_consts=tuple(
            _with_probe(x, probe) if isinstance(x, CodeType) else probe if x == _STAND_IN else x
            for x in code.co_consts
        )
    )


def _call(method: str, *arguments: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Constant(_STAND_IN), method, ast.Load())
    return ast.Call(function, list(arguments), [])


class _Looks(ast.NodeTransformer):
    """Gives the value of the outermost expression inside a span to the probe."""

    def __init__(self, file: SourceFile, span: Span, number: int) -> None:
        self._file = file
        self._span = span
        self._number = number
        self._is_done = False

    def visit(self, node: ast.AST) -> Any:
        if not self._is_done and isinstance(node, ast.expr) and hasattr(node, "lineno"):
            is_value = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
            if is_value and self._span.covers(self._file.span(node)):
                self._is_done = True
                look = _call("seen", node, ast.Constant(self._number))
                return ast.copy_location(look, node)
        return self.generic_visit(node)


def _join(edited: FunctionNode, old: FunctionNode) -> None:
    """Make of the edited function one that runs the old body in calls that are no part of the trial."""
    if isinstance(edited, ast.Lambda):
        assert isinstance(old, ast.Lambda)
        edited.body = ast.IfExp(_call("here"), edited.body, copy.deepcopy(old.body))
        return
    assert not isinstance(old, ast.Lambda)
    declared: dict[type[ast.Global] | type[ast.Nonlocal], set[str]] = {ast.Global: set(), ast.Nonlocal: set()}
    bodies = [edited.body, copy.deepcopy(old.body)]
    for body in bodies:
        body[:] = [_Undeclared(declared).visit(statement) for statement in body]
    heads: list[ast.stmt] = [kind(sorted(names)) for kind, names in declared.items() if names]
    edited.body = [*heads, ast.If(_call("here"), *bodies)]


class _Undeclared(ast.NodeTransformer):
    """Takes out the declarations of a function's own body: they must come before the first use of a name."""

    def __init__(self, declared: dict[type[ast.Global] | type[ast.Nonlocal], set[str]]) -> None:
        self._declared = declared

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Global | ast.Nonlocal):
            self._declared[type(node)] |= set(node.names)
            return ast.copy_location(ast.Pass(), node)
        return node if isinstance(node, FunctionNode | ast.ClassDef) else self.generic_visit(node)
