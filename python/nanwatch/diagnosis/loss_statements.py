"""The statements that computed a loss outside all modules, from the stack of its `backward()`, to be run again.

The names of a frame keep their values until the backward. So only those statements of the function run again that bind
or fill a value which came from the model's outputs: no step of an optimizer, nothing that hands out data.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from types import CodeType, FrameType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.data import DataLoader

from ..instrumentation.execution_context import Autocast, RngState
from ..recording.observe import observe
from ..recording.walk import leaves
from ..report.finding import Finding, Value, value_of
from ..util.program_code import SKIPPED_FILES, frame_values
from .batch_snapshot import is_narrow
from .diagnosis import Expression
from .experiment import graph_nodes
from .operation import tensors_in
from .patching.code_swap import Probe, compiled_with, find_target, node_of
from .patching.source import FunctionNode, SourceFile, Span, Target, called_name, names_in, path_to
from .patching.table import DERIVATIVE_POLES, POLES, operation_name

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
# Lightning has twenty between the loss and the engine.
_MOST_FRAMES = 32
_RESULT = "__nanwatch_loss__"
# The name under which a call hands in the `self` of the loop's method: a module's call has one of its own.
_SELF = "self of the loop"
# A second call of these would take data, change an optimizer, or write something.
_NOT_TWICE = frozenset({
    "next", "input", "open", "exec", "eval", "print", "anext", "backward", "step", "zero_grad", "write", "send",
    "get_batch", "save", "autograd", "grad",
})  # fmt: skip
# Methods that change what they are called on, beside those of tensors that end in an underscore.
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "sort", "pop"})
_MOST_NODES = 6  # more are no hint


class Refused(Exception):  # noqa: N818 - a reason, in words
    """The statements cannot run a second time."""


class Caller(NamedTuple):
    """A function of the program that is under way, and has called what leads to the backward.

    `end` are the line and column at which the expression under way ends; Python 3.10 does not tell. `handed` has values
    for parameters that the function has deleted, as Trainer does: those of the same names in its own caller.
    """

    code: CodeType
    line: int
    end: tuple[int | None, int | None]
    names: dict[str, Any]
    globals: dict[str, Any]
    handed: Mapping[str, Any] = MappingProxyType({})


class Slice(NamedTuple):
    """The statements that computed a loss, the values of the names that they read, and their last line."""

    body: list[ast.stmt]
    reads: dict[str, Any]
    last_line: int


@dataclass(slots=True)
class BackwardCall:
    """A backward under way: what it began at, and the frames of the program that called it, the innermost first.

    `since` is the autograd sequence number of the first node that is no part of the model's forward. Where the loss
    called the model several times, it is that of the first call, and `forwards` are the numbers of them up to the one
    whose gradient failed.
    """

    roots: Sequence[Tensor]
    since: int
    forwards: Sequence[tuple[int, int]]
    callers: list[Caller]
    rng: RngState = field(default_factory=RngState.capture)
    autocast: tuple[Autocast, ...] = field(default_factory=Autocast.capture)
    remark: str = ""  # what the graph tells

    @classmethod
    def capture(cls, since: int, forwards: Sequence[tuple[int, int]]) -> BackwardCall | None:
        """Return the backward under way, None where it is not known."""
        frame = _engine_frame()
        if frame is None:
            return None
        callers = list(islice(_callers(frame), _MOST_FRAMES))
        return cls(frame.f_locals["t_outputs"], since, forwards, callers)

    def is_behind(self, node: Any) -> bool:
        """Return whether the node of the graph was made from the model's outputs, and by no forward of the model."""
        number = node._sequence_nr()
        return number >= self.since and not any(begin <= number < end for begin, end in self.forwards)

    def statements(self, model: nn.Module) -> LossStatements:
        """Return the statements of the first caller that computed the loss. Raise Refused, with the reason."""
        for caller, above in zip(self.callers, [*self.callers[1:], None], strict=True):
            file = SourceFile.load(caller.code.co_filename)
            if above is not None:
                parameters = caller.code.co_varnames[: caller.code.co_argcount]
                handed = {name: above.names[name] for name in parameters if name in above.names}
                caller = caller._replace(handed=handed)
            if file is not None and (part := slice_of(caller, file, self.is_behind)) is not None:
                return LossStatements(model, caller, file, self.is_behind, part)
        raise Refused("the source of the loss was not found")


def loss_under_way() -> Tensor | None:
    """Return the loss whose `backward()` is under way, None where what it began at is no single number."""
    frame = _engine_frame()
    names: dict[str, Any] = {} if frame is None else frame.f_locals
    roots: Sequence[Tensor] = names["t_outputs"] if names.get("kwargs", {}).get("accumulate_grad") else ()
    return roots[0] if len(roots) == 1 and roots[0].numel() == 1 else None


def loss_value(call: BackwardCall) -> Value | None:
    """Return which non-finite values the tensors hold that the backward began at; None for finite ones."""
    records = [observe(x.detach(), "output", "output") for x in call.roots]
    return next((value_of(record) for record in records if record.is_fault), None)


def read_graph(finding: Finding, call: BackwardCall) -> Finding:
    """Return the finding with what the graph of the backward under way tells of the loss.

    The gradient came to the model non-finite. The values that the nodes of the loss saved are gone. Only their names
    tell which can have made it.
    """
    behind = filter(call.is_behind, graph_nodes((x.grad_fn for x in call.roots), call.since))
    nodes = sorted(behind, key=lambda node: int(node._sequence_nr()))
    is_finite = loss_value(call) is None
    names = DERIVATIVE_POLES if is_finite else POLES | DERIVATIVE_POLES
    poles = [node for node in nodes if operation_name(node.name()) in names and not _is_whole_power(node)]
    if not nodes:
        return finding
    listed = list(dict.fromkeys(node.name() for node in poles or nodes))[:_MOST_NODES]
    call.remark = (
        f"the loss was {'finite' if is_finite else 'not finite'}; of what lies between the model and the loss, the"
        f" value can come from {' or '.join(listed)}"
    )
    # A gradient may overflow in any operation on half precision, and where it is converted to it.
    is_half = any(is_narrow(str(x.dtype)) for x in call.roots) or any(
        node.name() == "ToCopyBackward0" for node in nodes
    )
    operation = poles[0].name() if len(poles) == 1 and not is_half else None
    return replace(finding, operation=operation, remarks=(*finding.remarks, call.remark))


def _is_whole_power(node: Any) -> bool:
    """Return whether the node is that of a power without a pole, as of a square."""
    exponent = getattr(node, "_saved_exponent", None) if node.name().startswith("PowBackward0") else None
    return isinstance(exponent, int | float) and exponent >= 1


def _engine_frame() -> FrameType | None:
    """Return the frame that runs this thread's backward; in a thread of the engine, the only one there is."""
    frame = _engine_above(sys._getframe(1))
    if frame is not None:
        return frame
    tops = sys._current_frames().values()
    frames = [engine for top in tops if (engine := _engine_above(top)) is not None]
    return frames[0] if len(frames) == 1 else None


def _engine_above(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _ENGINE:
        frame = frame.f_back
    return frame


def _callers(frame: FrameType) -> Iterator[Caller]:
    above = frame.f_back
    while above is not None:
        frame, above = above, above.f_back
        code = frame.f_code
        if code.co_filename.startswith(SKIPPED_FILES):
            continue
        end: tuple[int | None, int | None] = (None, None)
        if sys.version_info >= (3, 11):
            positions = list(code.co_positions())[frame.f_lasti // 2]
            end = positions[1], positions[3]
        yield Caller(code, frame.f_lineno, end, frame_values(frame), frame.f_globals)


def slice_of(caller: Caller, file: SourceFile, is_behind: Callable[[Any], bool]) -> Slice | None:
    """Return the statements that computed the loss of the call under way; None where the frame was only handed it.

    Statements that made a bad value without a graph, such as a target, are among them where they may run again.
    """
    top = _body_of(caller, file)
    end_line, column = caller.end
    line = caller.line if end_line is None else end_line
    path = [] if top is None or isinstance(top, ast.Lambda) else path_to(top, line, column)
    if not path:
        return None
    try:
        if (part := _Slicer(caller, is_behind, follows_bad=True).cut(path)) is not None:
            return part
    except Refused:
        pass
    return _Slicer(caller, is_behind, follows_bad=False).cut(path)


def _body_of(caller: Caller, file: SourceFile) -> FunctionNode | ast.Module | None:
    return file.tree if caller.code.co_name == "<module>" else node_of(file.tree, caller.code)


class _Slicer:
    """Goes back from the loss over the statements before it, with the names whose values they have to make."""

    def __init__(self, caller: Caller, is_behind: Callable[[Any], bool], *, follows_bad: bool) -> None:
        self._caller = caller
        self._is_behind = is_behind
        self._follows_bad = follows_bad
        self._reads: dict[str, Any] = {}
        # Names that a later statement binds: their values are no longer those that an earlier one read.
        self._bound: set[str] = set()

    def cut(self, path: list[tuple[list[ast.stmt], ast.stmt]]) -> Slice | None:
        statement = path[-1][1]
        loss = self._loss_in(statement)
        if loss is None:
            return None
        needed = self._read(loss)
        result = ast.copy_location(ast.Assign([ast.Name(_RESULT, ast.Store())], loss), statement)
        body: list[ast.stmt] = [result]
        for block, inner in reversed(path):
            before, needed = self._block(block[: block.index(inner)], needed)
            body = [*before, *body]
        # A parameter that is gone, and a list or dict of others that these statements fill.
        known = {**self._caller.handed, **self._caller.names}
        given = {
            name
            for name in needed
            if name in known and (isinstance(known[name], list | dict) or not self._is_made(known[name]))
        }
        self._reads.update((name, known[name]) for name in given)
        is_computed = any(isinstance(node, ast.Call | ast.BinOp) for node in ast.walk(loss))
        if needed - given or (len(body) == 1 and not is_computed):
            return None
        self._refuse_twice(*body)
        return Slice(body, self._reads, statement.end_lineno or statement.lineno)

    def _loss_in(self, statement: ast.stmt) -> ast.expr | None:
        """Return the loss in the call under way: what has the method `backward`, else the argument that was made."""
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        if self._caller.end[0] is not None:
            calls = [call for call in calls if (call.end_lineno, call.end_col_offset) == self._caller.end]
        else:
            calls = [call for call in calls if called_name(call) == "backward"]
        if len(calls) != 1:
            return None
        call = calls[0]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            owner = call.func.value
            if not call.args or self._read(owner) or any(isinstance(x, ast.Call) for x in ast.walk(owner)):
                return owner
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        made = [argument for argument in given if self._read(argument)]
        return made[0] if len(made) == 1 else None

    def _read(self, *nodes: ast.AST) -> set[str]:
        """Return the names in these nodes that earlier statements have to make. Keep the values of the others."""
        values, needed = self._caller.names, set()
        for name in {name for node in nodes for name in names_in(node, ast.Load)}:
            is_gone = name not in values and name in self._caller.code.co_varnames
            if name in self._bound or is_gone or self._is_made(values.get(name)):
                needed.add(name)
            elif name in values:
                self._reads[name] = values[name]
        return needed

    def _is_made(self, value: Any) -> bool:
        """Return whether the value was computed from the model's outputs, or is bad and its statement is sought."""
        is_distribution = isinstance(value, Distribution)  # which holds tensors of a graph that is gone
        tensors = (
            [x for _, x in leaves(value, "") if isinstance(x, Tensor)]
            if is_distribution
            else tensors_in(value)
        )
        return any(x.grad_fn is not None and self._is_behind(x.grad_fn) for x in tensors) or (
            self._follows_bad
            and any(not x.requires_grad and observe(x, "", "output").is_fault for x in tensors)
        )

    def _block(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return those of the statements that make the needed names, and the names that they need themselves."""
        body: list[ast.stmt] = []
        for statement in reversed(statements):
            bound, filled = names_in(statement, ast.Store), _filled_by(statement)
            filled &= needed | self._reads.keys()
            self._bound |= bound | filled
            if bound & needed or filled:
                kept, needed = self._statement(statement, needed | filled)
                body = [kept, *body]
        return body, needed

    def _statement(self, statement: ast.stmt, needed: set[str]) -> tuple[ast.stmt, set[str]]:
        """Return the statement as it runs again, and the names that have to be made before it."""
        if isinstance(statement, ast.With):
            body, needed = self._block(statement.body, needed)
            made: ast.stmt = ast.With(statement.items, body)
            needed |= self._read(*(item.context_expr for item in statement.items))
        elif isinstance(statement, ast.Try):  # whose body raised nothing
            body, needed = self._block([*statement.body, *statement.orelse], needed)
            made = ast.If(ast.Constant(True), body, [])
        elif isinstance(statement, ast.If):
            body, first = self._branch(statement.body, needed)
            others, second = self._branch(statement.orelse, needed)
            made = ast.If(statement.test, body or [ast.copy_location(ast.Pass(), statement)], others)
            needed = first | second | self._read(statement.test)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            made = ast.Assign([*targets], statement.value)  # a function evaluates no annotation
            for target in targets:
                needed = needed - names_in(target, ast.Store) | self._read(target)
            needed = needed | self._read(statement.value)
        elif isinstance(statement, ast.For) and self._takes_data(statement):
            raise self._refused(statement)
        elif isinstance(statement, ast.For) and not _jumps(statement):
            # A second time, as an iteration reads what an earlier one has made.
            body, inner = self._block(statement.body, needed | self._block(statement.body, needed)[1])
            made = ast.For(statement.target, statement.iter, body, [])
            needed = inner - names_in(statement.target, ast.Store) | self._read(statement.iter)
        elif isinstance(statement, ast.AugAssign | ast.Expr | ast.For):
            made = statement
            bound = names_in(statement.target, ast.Store) if isinstance(statement, ast.For) else set()
            needed = (needed | self._read(statement)) - bound
        else:
            raise self._refused(statement)
        return ast.copy_location(made, statement), needed

    def _takes_data(self, loop: ast.For) -> bool:
        """Return whether the loop is over a DataLoader, or an iterator that would be further on than before."""
        values = [self._caller.names.get(name) for name in names_in(loop.iter, ast.Load)]
        for node in ast.walk(loop.iter):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = self._caller.names.get(node.value.id)
                values.append(getattr(owner, "__dict__", {}).get(node.attr))
        return any(isinstance(value, Iterator | DataLoader) for value in values)

    def _branch(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return the block; one that may not run twice raises instead, as the condition may choose the other."""
        try:
            body, inner = self._block(statements, needed)
            self._refuse_twice(*body)
            return body, inner
        except Refused as reason:
            return ast.parse(f"raise RuntimeError({str(reason)!r})").body, needed

    def _refuse_twice(self, *nodes: ast.AST) -> None:
        for node in (inner for top in nodes for inner in ast.walk(top)):
            is_once = isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
            if is_once or (isinstance(node, ast.Call) and called_name(node) in _NOT_TWICE):
                raise self._refused(node)

    def _refused(self, node: ast.AST) -> Refused:
        line = getattr(node, "lineno", 0)
        return Refused(f"line {line} of {self._caller.code.co_filename} should not run a second time")


def _jumps(loop: ast.For) -> bool:
    """Return whether the loop has an `else`, or a statement that leaves a part of its body out."""
    jumps = ast.Break | ast.Continue | ast.Return
    return bool(loop.orelse) or any(isinstance(x, jumps) for x in ast.walk(loop))


def _filled_by(statement: ast.stmt) -> set[str]:
    """Return the names whose values the statement changes in place: `p.clamp_()`, `s.den = x`, `losses["a"] = x`."""
    filled: list[ast.AST] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            filled.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = called_name(node)
            if name in _CHANGES or (name.endswith("_") and not name.endswith("__")):
                filled.append(node.func)
    return {name for node in filled if (name := _base(node))}


def _base(node: ast.AST) -> str:
    """Return the name at the left of `name.attribute[item]`, "" where there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


class LossStatements(nn.Module):
    """The statements as a module, whose call runs them and returns the loss. `inputs` are what they read, by name."""

    def __init__(
        self,
        model: nn.Module,
        caller: Caller,
        file: SourceFile,
        is_behind: Callable[[Any], bool],
        part: Slice,
    ) -> None:
        super().__init__()
        self.model = model  # so that a re-run of the statements holds its state, and no watch sees its calls
        self.filename = file.name
        self.lines = part.body[0].lineno, part.last_line
        self.inputs = {
            _SELF if name == "self" else name: value
            for name, value in sorted(part.reads.items())
            if tensors_in(value)
        }
        self._body, self._caller, self._file, self._is_behind = part.body, caller, file, is_behind
        self._names = {**caller.globals, **caller.names, **part.reads}
        self._probe = Probe()
        self._code = compiled_with(ast.Module(part.body, []), file, (), self._probe)

    def forward(self, **inputs: Any) -> Any:
        """Run the statements with these values of the names they read."""
        self._probe.was_run = True
        names = {**self._names, **inputs}
        if _SELF in names:
            names["self"] = names.pop(_SELF)
        # A list or a dict that the statements fill is the program's.
        filled = {
            name
            for x in self._body
            for name in _filled_by(x)
            if isinstance(names.get(name), list | dict | set)
        }
        names |= {name: copy.copy(names[name]) for name in filled}
        exec(self._code, names)
        return names[_RESULT]

    def target(self, place: Expression) -> Target | str:
        """Return the statements as what runs a line, if it is one of theirs; else as `find_target` does."""
        is_own = any(x.lineno <= place.line <= (x.end_lineno or x.lineno) for x in self._body)
        node = _body_of(self._caller, self._file)
        if place.filename != self.filename or not is_own or node is None:
            return find_target(place)
        return Target((FunctionType(self._code, self._names),), self._file, node, self.exchanged)

    @contextmanager
    def exchanged(self, file: SourceFile, looks: Sequence[Span], probe: Probe) -> Iterator[None]:
        """Run the same statements of the edited file in the block, as `code_swap.exchanged` does for a function.

        Raises ValueError where the edit needs statements that did not run. Some may no longer be needed.
        """
        # A line that was added stands before the backward.
        added = file.text.count("\n") - self._file.text.count("\n")
        end = self._caller.end[0]
        moved = None if end is None else end + added, self._caller.end[1]
        caller = self._caller._replace(line=self._caller.line + added, end=moved)
        part = slice_of(caller, file, self._is_behind)
        if part is None or len(part.body) > len(self._body) + max(added, 0):
            raise ValueError("the edit moved the statements")
        before = self._code, self._probe
        self._code, self._probe = compiled_with(ast.Module(part.body, []), file, looks, probe), probe
        try:
            yield
        finally:
            self._code, self._probe = before
