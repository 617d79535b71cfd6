"""Other source for a function that exists, for the calls of one thread and for a time.

The edited function is compiled from its whole file. In the place of the function's own code comes one that calls the
edited function in the thread of the trial, and the old one in all others.
"""

from __future__ import annotations

import ast
import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from ...instrumentation.slot import is_of_thread
from ...numerics._extension import instances_of
from ..diagnosis import Expression
from ..operation import tensors_in
from .source import FunctionNode, SourceFile, Span, Target, first_line

# Stands for the Probe in compiled code, until the Probe itself takes its place among the constants.
_STAND_IN = "nanwatch.diagnosis.patching.code_swap.Probe"
# Larger values are not kept, and of the evaluations of one expression, as in a loop, no more than the first.
MOST_ELEMENTS = 1 << 24
_MOST_KEPT = 16
# Finds what runs the code of a place, or says why nothing can be put there.
TargetFinder = Callable[[Expression], Target | str]


class Probe:
    """Keeps copies of the values of expressions of the edited code by their number, as they are evaluated."""

    def __init__(self) -> None:
        self.values: dict[int, list[Any]] = {}

    def seen(self, value: Any, number: int) -> Any:
        """Keep the tensors of a value, or the number that it is, and return it."""
        kept = self.values.setdefault(number, [])
        if len(kept) < _MOST_KEPT:
            kept += [x.detach().clone() for x in tensors_in(value) if x.numel() <= MOST_ELEMENTS]
            if isinstance(value, int | float) and not isinstance(value, bool):
                kept.append(value)
        return value

    def tensors(self, number: int) -> list[Tensor]:
        """Return the kept tensors of an expression."""
        return [x for x in self.values.get(number, []) if isinstance(x, Tensor)]


def _branch(function: FunctionType, code: CodeType) -> Callable[..., Any]:
    """Return a function that runs this code in this thread, and the present code in all others."""
    owner = threading.get_ident()
    before, edited = _copy_of(function, function.__code__), _copy_of(function, code)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (edited if is_of_thread(owner) else before)(*args, **kwargs)

    return call


def _copy_of(function: FunctionType, code: CodeType) -> FunctionType:
    """Return a function with the globals, defaults and free variables of another one, and this code."""
    names = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(code, *names)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _branching(*args: Any, **kwargs: Any) -> Any:
    return "nanwatch.diagnosis.patching.code_swap.Probe".__call__(*args, **kwargs)  # type: ignore[operator]


def find_target(place: Expression) -> Target | str:
    """Return the functions that run the code of a place, or why there is none to exchange."""
    file, code = SourceFile.load(place.filename), place.code
    if file is None:
        return f"the source of {place.filename} is not at hand"
    functions = _functions_with(code, place.filename) if code is not None else []
    if not functions:
        return "the line belongs to no function that could be exchanged"
    code = functions[0].__code__
    if code not in _compiled(file.tree, file, code, code.co_firstlineno):
        return (
            f"{place.filename} is not what runs: it was edited since it was imported, or rewritten on import"
        )
    node = node_of(file, code)
    if node is None:
        return f"several functions begin on line {code.co_firstlineno}, and which of them failed is not known"
    return Target(tuple(functions), file, node)


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
    for number, span in enumerate(looks):
        _Looks(file, span, number).visit(place)
    ast.fix_missing_locations(place)
    code = next(iter(_compiled(tree, file, before, first_line(place))), None)
    if code is None or code.co_freevars != before.co_freevars:
        raise ValueError("the edited function has other free variables")
    code = _with_constant(code, probe)
    try:
        for function in target.functions:
            branch = _with_constant(_branching.__code__, _branch(function, code))
            function.__code__ = branch.replace(co_freevars=before.co_freevars)
        yield
    finally:
        for function in target.functions:
            function.__code__ = before


def node_in(target: Target, tree: ast.Module) -> FunctionNode | ast.Module:
    """Return the node of the target in the tree of an edited file. Raises ValueError where it is not known."""
    if isinstance(target.node, ast.Module):
        return tree
    before, after = functions_in(target.file.tree), functions_in(tree)
    if len(before) != len(after):
        raise ValueError("the edit moved the function")
    return after[before.index(target.node)]


def functions_in(tree: ast.AST) -> list[FunctionNode]:
    """Return all functions in a tree, the outer ones first."""
    return [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]


def _functions_with(code: CodeType, filename: str) -> list[FunctionType]:
    """Return the functions of this code; of a comprehension, or a function that is gone, those around it."""
    modules = (x for x in list(sys.modules.values()) if getattr(x, "__file__", None) == filename)
    members = [value for module in modules for value in vars(module).values()]
    members += [value for kind in members if isinstance(kind, type) for value in vars(kind).values()]
    # The garbage collector does not know objects after gc.freeze(): a module and its classes name most of these.
    known = {id(x): x for x in (*members, *instances_of(FunctionType)) if type(x) is FunctionType}
    functions = [
        x for x in known.values() if x.__code__.co_filename == filename and code in _codes(x.__code__)
    ]
    innermost = max((x.__code__ for x in functions), key=lambda x: x.co_firstlineno, default=None)
    return [x for x in functions if x.__code__ is innermost]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code, and those of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


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


def compiled_with(tree: ast.Module, file: SourceFile, looks: Sequence[Span], probe: Probe) -> CodeType:
    """Return the code of statements of the file, which gives the probe the values of the expressions at `looks`."""
    tree = copy.deepcopy(tree)  # the file's own stays as it is
    for number, span in enumerate(looks):
        _Looks(file, span, number).visit(tree)
    code = compile(ast.fix_missing_locations(tree), file.name, "exec", dont_inherit=True)
    return _with_constant(code, probe)


def _with_constant(code: CodeType, value: Any) -> CodeType:
    return code.replace(
        co_consts=tuple(
            _with_constant(x, value) if isinstance(x, CodeType) else value if x == _STAND_IN else x
            for x in code.co_consts
        )
    )


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
                function = ast.Attribute(ast.Constant(_STAND_IN), "seen", ast.Load())
                return ast.copy_location(ast.Call(function, [node, ast.Constant(self._number)], []), node)
        return self.generic_visit(node)
