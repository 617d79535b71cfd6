"""Other source for a function that exists, for the calls of one thread and for a time.

The edited function is compiled from its whole file, and its code takes the place of the function's own. It holds both
bodies, the edited one for the thread of the trial and the old one for all others.
"""

from __future__ import annotations

import ast
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MappingProxyType
from typing import Any

from ...instrumentation.slot import ExclusiveRun
from ...numerics._extension import instances_of
from .source import FunctionNode, SourceFile, Span, Target, first_line, nodes_at

# Stands for the Probe in compiled code, until the Probe itself takes its place among the constants.
_STAND_IN = "nanwatch.diagnosis.patching.code_swap.Probe"
# Evaluations of an expression, as in a loop, beside which others are evaluated.
_MOST_TRIED = 4
# Finds what runs a line of a file, or says why nothing can be put in its place.
TargetFinder = Callable[[str, int], Target | str]


class Probe:
    """Chooses the body that a call runs, and collects values of the edited one.

    `values` has, for each expression that is looked at by its number, what its evaluations gave to `keep`. `others` are
    expressions to be evaluated beside it, without its effects on the run: `tried` has what `tries` returned for them.
    """

    def __init__(
        self,
        keep: Callable[[Any], Any] = lambda value: value,
        others: Mapping[int, Sequence[ast.expr]] = MappingProxyType({}),
        tries: Callable[[Sequence[Callable[[], Any]]], Any] = tuple,
    ) -> None:
        self.values: dict[int, list[Any]] = {}
        self.tried: dict[int, list[Any]] = {}
        self.others = others
        self.was_run = False
        self._keep = keep
        self._tries = tries
        self._exclusive = ExclusiveRun()

    def here(self) -> bool:
        """Return whether this call is one of the trial."""
        found = self._exclusive.is_ours()
        self.was_run = self.was_run or found
        return found

    def seen(self, value: Any, number: int, *others: Callable[[], Any]) -> Any:
        """Keep a value, and return it."""
        self.values.setdefault(number, []).append(self._keep(value))
        tried = self.tried.setdefault(number, [])
        if others and len(tried) < _MOST_TRIED:
            tried.append(self._tries(others))
        return value


def find_target(filename: str, line: int, positions: tuple[int | None, ...] | None = None) -> Target | str:
    """Return the innermost function object that runs this line of this file, or why there is none to exchange.

    `positions` are those of the instruction that failed, as `code.co_positions()` has them.
    """
    file = SourceFile.load(filename)
    if file is None:
        return f"the source of {filename} is not at hand"
    functions = [one for one in _functions_of_module(filename) if _runs_itself(one.__code__, line)]
    if not functions:
        # In a child process gc's list of all objects copies the pages that hold them, which takes 0.1 s.
        in_file = (one for one in instances_of(FunctionType) if one.__code__.co_filename == filename)
        functions = [one for one in in_file if _runs(one.__code__, line)]
    if not functions:
        functions = [one for one in _functions_of_module(filename) if _runs(one.__code__, line)]
    if not functions:
        return "the line belongs to no function that could be exchanged"
    functions = [one for one in functions if _has(one.__code__, positions)] or functions
    code = max((one.__code__ for one in functions), key=lambda code: code.co_firstlineno)
    if not any(_is_same(one, code) for one in _compiled(file.tree, file, code)):
        return f"{filename} is not what runs: it was edited since it was imported, or rewritten on import"
    node = node_of(file.tree, code)
    rivals = {one.__code__ for one in functions if one.__code__.co_firstlineno == code.co_firstlineno}
    if node is None or len(rivals) > 1:
        return f"several functions begin on line {code.co_firstlineno}, and which of them failed is not known"
    return Target(tuple(one for one in functions if one.__code__ is code), file, node)


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
    assert not isinstance(target.node, ast.Module)
    nodes, edited = _nodes_of(target.file.tree, before), _nodes_of(tree, before)
    if target.node not in nodes or len(edited) != len(nodes):
        raise ValueError("the edit moved the function")
    place = edited[nodes.index(target.node)]
    for number, span in enumerate(looks):
        _Looks(file, span, number, probe.others.get(number, ())).visit(place)
    _join(place, target.node)
    ast.fix_missing_locations(place)
    code = next((one for one in _compiled(tree, file, before) if _STAND_IN in one.co_consts), None)
    if code is None or code.co_freevars != before.co_freevars:
        raise ValueError("the edited function has other free variables")
    code = _with_probe(code, probe)
    try:
        for one in target.functions:
            one.__code__ = code
        yield
    finally:
        for one in target.functions:
            if one.__code__ is code:
                one.__code__ = before


def _functions_of_module(filename: str) -> Iterator[FunctionType]:
    """Yield the functions of this file that its module, its classes and their decorators hold."""
    modules = (one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == filename)
    left = [one for module in modules for one in vars(module).values()]
    known: set[int] = set()
    while left:
        one = left.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        if type(one) is FunctionType:
            if one.__code__.co_filename == filename:
                yield one
            # A decorator's function holds the one it wraps in a cell.
            left += [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
        elif issubclass(type(one), type):
            left += vars(one).values()
        elif type(one) in (staticmethod, classmethod):
            left.append(one.__func__)
        elif type(one) is property:
            left += [one.fget, one.fset]


def _runs_itself(code: CodeType, line: int) -> bool:
    return any(number == line for _, _, number in code.co_lines())


def _runs(code: CodeType, line: int) -> bool:
    return _runs_itself(code, line) or any(
        isinstance(one, CodeType) and _runs(one, line) for one in code.co_consts
    )


def _has(code: CodeType, positions: tuple[int | None, ...] | None) -> bool:
    """Return whether an instruction of the code, or of a function in it, has these positions."""
    if positions is None or sys.version_info < (3, 11):
        return True
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(positions) in code.co_positions() or any(_has(one, positions) for one in inner)


def node_of(tree: ast.Module, code: CodeType) -> FunctionNode | None:
    """Return the only node that the code can be compiled from, by name, line, and columns where Python has any."""
    found = _nodes_of(tree, code)
    if len(found) > 1 and sys.version_info >= (3, 11):
        # The first instruction has the place of the line.
        places = [one for one in code.co_positions() if None not in one and one[2:] != (0, 0)]
        found = [node for node in found if all(_covers(node, *one) for one in places)]
    return found[0] if len(found) == 1 else None


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


def _compiled(tree: ast.Module, file: SourceFile, code: CodeType) -> Iterator[CodeType]:
    """Yield the codes of that name and first line in the compiled module.

    IPython compiles each statement of a cell by itself. A method of a name that the same unit has imported, such as
    torch.log, is then called by other instructions.
    """
    units = [tree] if file.is_file else [ast.Module([one], []) for one in tree.body]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left: list[CodeType] = [compile(unit, file.name, "exec", dont_inherit=True) for unit in units]
    while left:
        one = left.pop()
        if (one.co_name, one.co_firstlineno) == (code.co_name, code.co_firstlineno):
            yield one
        left += [inner for inner in one.co_consts if isinstance(inner, CodeType)]


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Return whether two codes do the same, wherever they were compiled."""
    if (one.co_code, one.co_names, one.co_varnames, one.co_freevars) != (
        other.co_code,
        other.co_names,
        other.co_varnames,
        other.co_freevars,
    ):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        _is_same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


def compiled_with(tree: ast.Module, file: SourceFile, looks: Sequence[Span], probe: Probe) -> CodeType:
    """Return the code of statements of the file, which gives the probe the values of the expressions at `looks`."""
    for number, span in enumerate(looks):
        _Looks(file, span, number, probe.others.get(number, ())).visit(tree)
    code = compile(ast.fix_missing_locations(tree), file.name, "exec", dont_inherit=True)
    return _with_probe(code, probe)


def _with_probe(code: CodeType, probe: Probe) -> CodeType:
    return code.replace(
        co_consts=tuple(
            _with_probe(one, probe) if isinstance(one, CodeType) else probe if one == _STAND_IN else one
            for one in code.co_consts
        )
    )


def _call(method: str, *arguments: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Constant(_STAND_IN), method, ast.Load())
    return ast.Call(function, list(arguments), [])


def _thunk(body: ast.expr) -> ast.expr:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), copy.deepcopy(body))


class _Looks(ast.NodeTransformer):
    """Gives the value of the outermost expression inside a span to the probe, and others as functions beside it."""

    def __init__(self, file: SourceFile, span: Span, number: int, others: Sequence[ast.expr] = ()) -> None:
        self._others = [_thunk(one) for one in others]
        self._file = file
        self._span = span
        self._number = number
        self._is_done = False

    def visit(self, node: ast.AST) -> Any:
        if not self._is_done and isinstance(node, ast.expr) and hasattr(node, "lineno"):
            is_value = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
            if is_value and self._span.covers(self._file.span(node)):
                self._is_done = True
                look = _call("seen", node, ast.Constant(self._number), *self._others)
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
        body[:] = [_Undeclared(declared).visit(one) for one in body]
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
