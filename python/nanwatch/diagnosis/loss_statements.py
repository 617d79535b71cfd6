"""The statements that computed a loss outside all modules, from the stack of its `backward()`, to be run again.

The names of a frame keep their values until the backward. So only those statements of the function run again that bind
or fill a value which came from the model's outputs: no step of an optimizer, nothing that hands out data.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from types import CodeType, FrameType, FunctionType
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
from . import isolation
from .batch_snapshot import is_narrow
from .diagnosis import Expression
from .experiment import graph_nodes
from .operation import tensors_in
from .patching.source import (
    Probe,
    SourceFile,
    Span,
    Target,
    called_name,
    compiled_with,
    find_target,
    names_in,
    node_of,
    paths_to,
)
from .patching.table import DERIVATIVE_POLES, POLES, operation_name

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
# Lightning has twenty between the loss and the engine.
_MOST_FRAMES = 32
_RESULT = "__nanwatch_loss__"
# A second call of these would take data, change an optimizer, or write something.
_NOT_TWICE = frozenset({
    "next", "input", "open", "exec", "eval", "print", "anext", "backward", "step", "zero_grad", "write", "send",
    "get_batch", "save", "autograd", "grad",
})  # fmt: skip
# Methods that change what they are called on, beside those of tensors that end in an underscore.
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "sort", "pop"})
_JUMPS = ast.Break | ast.Continue | ast.Return
_MOST_NODES = 6  # more are no hint
# Statements, and the values of the names that they read.
Slice = tuple[list[ast.stmt], dict[str, Any]]


class Refused(Exception):  # noqa: N818 - a reason, in words
    """The statements cannot run a second time."""


class Caller(NamedTuple):
    """A function of the program that is under way at a line, and has called what leads to the backward.

    `deleted`: parameters that it has deleted, as Trainer does. Their `names` have what its own caller calls so.
    """

    code: CodeType
    line: int
    names: dict[str, Any]
    globals: dict[str, Any]
    deleted: frozenset[str] = frozenset()


@dataclass(slots=True)
class BackwardCall:
    """A backward under way: what it began at, and the frames of the program that called it, the innermost first.

    `since` is the autograd sequence number of the first node that is no part of the model's forward. Where the loss
    called the model several times, it is that of the first call, and `forwards` are the numbers of them up to the one
    whose gradient failed. `rngs` are random states from which the loss may have begun: that of the last step of an
    optimizer, that of the model's first call, as data may be drawn between the two, and the present one.
    """

    roots: Sequence[Tensor]
    since: int
    forwards: Sequence[tuple[int, int]]
    callers: list[Caller]
    rngs: Sequence[RngState] = ()
    autocast: tuple[Autocast, ...] = field(default_factory=Autocast.capture)

    @classmethod
    def capture(
        cls, since: int, forwards: Sequence[tuple[int, int]], rngs: Sequence[RngState]
    ) -> BackwardCall | None:
        """Return the backward under way, None where it is not known. `rngs`: random states of before it."""
        frame = _engine_frame()
        if frame is None:
            return None
        callers = list(islice(_callers(frame), _MOST_FRAMES))
        return cls(frame.f_locals["t_outputs"], since, forwards, callers, [*rngs, RngState.capture()])

    def is_behind(self, node: Any) -> bool:
        """Return whether the node of the graph was made from the model's outputs, and by no forward of the model."""
        number = -1 if node is None else node._sequence_nr()
        return number >= self.since and not any(begin <= number < end for begin, end in self.forwards)

    def statements(self, model: nn.Module, *, whole: bool) -> LossStatements:
        """Return the statements of the first caller that computed the loss, with the model's calls if it is `whole`.

        Raises Refused, with the reason.
        """
        is_behind = None if whole else self.is_behind
        for caller, above in zip(self.callers, [*self.callers[1:], None], strict=True):
            file = SourceFile.load(caller.code.co_filename)
            if above is not None:
                parameters = caller.code.co_varnames[: caller.code.co_argcount]
                deleted = {*parameters} & above.names.keys() - caller.names.keys()
                names = caller.names | {name: above.names[name] for name in deleted}
                caller = caller._replace(names=names, deleted=frozenset(deleted))
            if file is not None and (part := slice_of(caller, file, is_behind)) is not None:
                return LossStatements(model, caller, file, is_behind, part)
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


def with_poles(finding: Finding, call: BackwardCall) -> Finding:
    """Return the finding with the operations of a loss that does not run again which can have made the value.

    The values that the nodes of its graph saved are gone, and only their names tell. A gradient may overflow in any
    operation on half precision, and where it is converted to it.
    """
    is_finite = loss_value(call) is None
    nodes = [node for node in graph_nodes(x.grad_fn for x in call.roots) if call.is_behind(node)]
    names = DERIVATIVE_POLES if is_finite else POLES | DERIVATIVE_POLES
    poles = [node for node in nodes if operation_name(node.name()) in names and not _is_whole_power(node)]
    listed = " or ".join(list(dict.fromkeys(node.name() for node in reversed(poles)))[:_MOST_NODES])
    remark = f"the loss was {'finite' if is_finite else 'not finite'}; the value can come from {listed}"
    is_half = any(is_narrow(str(x.dtype)) for x in call.roots) or any(
        node.name() == "ToCopyBackward0" for node in nodes
    )
    operation = poles[0].name() if len(poles) == 1 and not is_half else None
    return replace(finding, operation=operation, remarks=(*finding.remarks, *([remark] if poles else ())))


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
        if not frame.f_code.co_filename.startswith(SKIPPED_FILES):
            yield Caller(frame.f_code, frame.f_lineno, frame_values(frame), frame.f_globals)


# Returns whether the node of a graph is behind the model's outputs. None stands for one that knows no model.
IsBehind = Callable[[Any], bool] | None


def slice_of(caller: Caller, file: SourceFile, is_behind: IsBehind) -> Slice | None:
    """Return the statements that computed the loss of the call under way; None where the frame was only handed it.

    Statements that made a bad value without a graph, such as a target, are among them where they may run again. So are
    the model's calls without `is_behind`, and where a statement differentiates their outputs: their graphs are gone.
    """
    top = node_of(file, caller.code)
    for path in () if top is None else paths_to(top, caller.line):
        slicer = _Slicer(caller, is_behind)
        part = slicer.cut(path)
        if part is not None and slicer.differentiates:
            part = _Slicer(caller, None).cut(path) or part
        if part is not None:
            return part
    return None


class _Slicer:
    """Goes back from the loss over the statements before it, with the names whose values they have to make."""

    def __init__(self, caller: Caller, is_behind: IsBehind) -> None:
        self.differentiates = False
        self._caller = caller
        self._is_behind = is_behind
        self._reads: dict[str, Any] = {}
        # Names that a later statement binds: their values are no longer those that an earlier one read.
        self._bound: set[str] = set()

    def cut(self, path: list[tuple[list[ast.stmt], ast.stmt]]) -> Slice | None:
        statement, values = path[-1][1], self._caller.names
        loss = self._loss_in(statement)
        if loss is None:
            return None
        self._refuse_twice(loss)
        needed = self._read(loss)
        result = ast.copy_location(ast.Assign([ast.Name(_RESULT, ast.Store())], loss), statement)
        body: list[ast.stmt] = [result]
        for block, inner in reversed(path):
            before, needed = self._block(block[: block.index(inner)], needed)
            body = [*before, *body]
        # A bad parameter, and a list or dict of others that these statements fill.
        known = {x: values[x] for x in needed & values.keys()}
        known = {x: y for x, y in known.items() if isinstance(y, list | dict) or not self._has_graph(y)}
        self._reads |= known
        is_computed = any(isinstance(node, ast.Call | ast.BinOp) for node in ast.walk(loss))
        return None if needed - known.keys() or (len(body) == 1 and not is_computed) else (body, self._reads)

    def _loss_in(self, statement: ast.stmt) -> ast.expr | None:
        """Return the loss: what has the method `backward`, else the only made argument of a call."""
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                owner = call.func.value
                is_called = any(isinstance(x, ast.Call) for x in ast.walk(owner))
                if not call.args or is_called or self._read(owner):
                    return owner
        arguments = [x for call in calls for x in (*call.args, *(keyword.value for keyword in call.keywords))]
        made = [argument for argument in arguments if self._read(argument)]
        return made[0] if len(made) == 1 else None

    def _read(self, node: ast.AST) -> set[str]:
        """Return the names in the node that earlier statements have to make. Keep the values of the others."""
        values, needed = self._caller.names, set()
        for name in names_in(node, ast.Load):
            # A statement may have bound a deleted parameter anew, as Trainer's does that prepares the inputs.
            is_gone = name in self._caller.deleted or (
                name not in values and name in self._caller.code.co_varnames
            )
            value = values.get(name)
            # A module keeps its weights: made anew, it would have others.
            is_needed = name in self._bound and not isinstance(value, nn.Module)
            if is_needed or is_gone or self._is_made(value):
                needed.add(name)
            elif name in values:
                self._reads[name] = value
        return needed

    def _is_made(self, value: Any) -> bool:
        """Return whether the value was computed from the model's outputs, or is bad and its statement is sought."""
        is_bad = (not x.requires_grad and observe(x, "", "output").is_fault for x in _tensors(value))
        return self._has_graph(value) or any(is_bad)

    def _has_graph(self, value: Any) -> bool:
        nodes = [x.grad_fn for x in _tensors(value) if x.grad_fn is not None]
        return any(self._is_behind is None or self._is_behind(node) for node in nodes)

    def _block(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return those of the statements that make the needed names, and the names that they need themselves."""
        body: list[ast.stmt] = []
        values = self._caller.names
        for statement in reversed(statements):
            later, bound, filled = set(self._bound), names_in(statement, ast.Store), _filled_by(statement)
            filled &= needed | self._reads.keys()
            self._bound |= bound | filled
            wanted = bound & needed | filled
            if not wanted:
                continue
            try:
                made = {name for name in filled if not isinstance(values.get(name), nn.Module)}
                kept, needed = self._statement(statement, needed | made)
            except Refused as reason:
                is_lost = wanted & later or any(x not in values or self._has_graph(values[x]) for x in wanted)
                # Bad data stays as it was handed out. A branch that is not taken may have what is lost.
                if not is_lost:
                    self._reads.update((name, values[name]) for name in wanted)
                source = f"raise RuntimeError({str(reason)!r})" if is_lost else "pass"
                kept, needed = ast.copy_location(ast.parse(source).body[0], statement), needed - wanted
            body = [kept, *body]
        return body, needed

    def _statement(self, statement: ast.stmt, needed: set[str]) -> tuple[ast.stmt, set[str]]:
        """Return the statement as it runs again, and the names that have to be made before it."""
        made, header = statement, list[ast.AST]()
        if isinstance(statement, ast.With):
            body, needed = self._block(statement.body, needed)
            made, header = ast.With(statement.items, body), [item.context_expr for item in statement.items]
        elif isinstance(statement, ast.Try):  # whose body raised nothing
            body, needed = self._block([*statement.body, *statement.orelse], needed)
            made = ast.If(ast.Constant(True), body, [])
        elif isinstance(statement, ast.If):
            body, first = self._block(statement.body, needed)
            alternative, second = self._block(statement.orelse, needed)
            body = body or [ast.copy_location(ast.Pass(), statement)]
            made, header = ast.If(statement.test, body, alternative), [statement.test]
            needed = first | second
        elif isinstance(statement, ast.For) and not self._takes_data(statement.iter):
            # A second time, as an iteration reads what an earlier one has made.
            body, needed = self._block(statement.body, needed | self._block(statement.body, needed)[1])
            if statement.orelse or any(isinstance(x, _JUMPS) for x in ast.walk(statement)):
                self._refuse_twice(statement)
                body = statement.body
            made, header = ast.For(statement.target, statement.iter, body, statement.orelse), [statement.iter]
            needed = needed - names_in(statement.target, ast.Store)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
            if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                made = ast.Assign([statement.target], statement.value)  # a function evaluates no annotation
            if not isinstance(statement, ast.AugAssign):
                needed = needed - names_in(statement, ast.Store)
            header = [statement]
        else:
            raise self._refused(statement)
        self._refuse_twice(*header)
        return ast.copy_location(made, statement), needed.union(*map(self._read, header))

    def _takes_data(self, iterated: ast.expr) -> bool:
        """Return whether a loop is over a DataLoader, or an iterator that would be further on than before."""
        values = [self._caller.names.get(name) for name in names_in(iterated, ast.Load)]
        for node in ast.walk(iterated):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = self._caller.names.get(node.value.id)
                values.append(getattr(owner, "__dict__", {}).get(node.attr))
        return any(isinstance(value, Iterator | DataLoader) for value in values)

    def _refuse_twice(self, *nodes: ast.AST) -> None:
        for node in (inner for top in nodes for inner in ast.walk(top)):
            is_once = isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
            name = called_name(node) if isinstance(node, ast.Call) else ""
            may_differentiate = name == "grad" and self._is_behind is None
            self.differentiates |= name == "grad" and not may_differentiate
            if is_once or (name in _NOT_TWICE and not may_differentiate):
                raise self._refused(node)

    def _refused(self, node: ast.AST) -> Refused:
        line = getattr(node, "lineno", 0)
        return Refused(f"line {line} of {self._caller.code.co_filename} should not run a second time")


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value, those of a distribution included: it holds tensors of a graph that is gone."""
    return [x for _, x in leaves(value, "", isinstance(value, Distribution)) if isinstance(x, Tensor)]


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


@contextmanager
def _no_backward() -> Iterator[ExitStack]:
    """Refuse a backward of this thread in the block: it would add to gradients that the program is about to use."""
    backward, owner, is_over = torch.autograd.backward, threading.get_ident(), threading.Event()

    def refuse(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == owner and not is_over.is_set():
            raise Refused("a function that the statements call makes a backward of its own")
        backward(*args, **kwargs)

    with ExitStack() as stack:
        # Two threads may end their blocks in any order.
        stack.callback(is_over.set)
        stack.callback(setattr, torch.autograd, "backward", backward)
        torch.autograd.backward = refuse
        yield stack


class LossStatements(nn.Module):
    """The statements as a module, whose call runs them. `inputs` are what they read, by name.

    A call returns the loss, and with the model's calls their outputs, without a graph.
    """

    def __init__(
        self, model: nn.Module, caller: Caller, file: SourceFile, is_behind: IsBehind, part: Slice
    ) -> None:
        super().__init__()
        self.model = model
        self.filename = file.name
        self._body, reads = part
        first, last = self._body[0].lineno, self._body[-1].end_lineno
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        self.where = f"{lines} of {self.filename}"
        self._names = {**caller.globals, **caller.names, **reads}
        mentioned = [self._names.get(name) for name in names_in(ast.Module(self._body, []), ast.Load)]
        for function in [x for x in mentioned if isinstance(x, FunctionType)]:
            with suppress(ValueError):  # of a name that its outer function has deleted
                mentioned += chain(*(x.values() for x in inspect.getclosurevars(function)[:2]))
        owned = [y for x in reads.values() for y in (x, *getattr(x, "__dict__", {}).values())]
        # A re-run puts back the state of all modules that the statements call, and no watch sees their calls.
        self.modules_read = nn.ModuleList(x for x in (*owned, *mentioned) if isinstance(x, nn.Module))
        self._generators = [x for x in (*owned, *mentioned) if isinstance(x, torch.Generator)]
        # `self` is the module in a call of it.
        self.inputs = {name: x for name, x in sorted(reads.items()) if tensors_in(x) and name != "self"}
        self._caller, self._file, self._is_behind = caller, file, is_behind
        self._filled = set().union(*map(_filled_by, self._body))
        self._code = compiled_with(ast.Module(self._body, []), file, (), Probe())

    def forward(self, **inputs: Any) -> Any:
        """Run the statements with these values of the names they read."""
        names, outputs = {**self._names, **inputs}, list[Tensor]()
        # A list or a dict that the statements fill is the program's.
        for name in self._filled & names.keys():
            if isinstance(names[name], list | dict | set):
                names[name] = copy.copy(names[name])
        with ExitStack() if isolation.is_child() else _no_backward() as stack:
            for generator in self._generators:
                stack.callback(generator.set_state, generator.get_state())
            if self._is_behind is None:
                hook = self.model.register_forward_hook(lambda *call: outputs.extend(tensors_in(call[-1])))
                stack.callback(hook.remove)
            exec(self._code, names)
        return names[_RESULT], [x.detach() for x in outputs]

    def target(self, place: Expression) -> Target | str:
        """Return the statements as what runs a line, if it is one of theirs; else as `find_target` does."""
        node = node_of(self._file, self._caller.code)
        is_own = any(x.lineno <= place.line <= (x.end_lineno or x.lineno) for x in self._body)
        if place.filename != self.filename or not is_own or node is None:
            return find_target(place)
        return Target((FunctionType(self._code, self._names),), self._file, node, self.exchanged)

    @contextmanager
    def exchanged(self, file: SourceFile, looks: Sequence[Span], probe: Probe) -> Iterator[None]:
        """Run the same statements of the edited file in the block, as `source.exchanged` does for a function.

        Raises ValueError where the edit moved the statements.
        """
        # A line that was added stands before the backward.
        added = file.text.count("\n") - self._file.text.count("\n")
        part = slice_of(self._caller._replace(line=self._caller.line + added), file, self._is_behind)
        if part is None:
            raise ValueError("the edit moved the statements")
        before, self._code = self._code, compiled_with(ast.Module(part[0], []), file, looks, probe)
        try:
            yield
        finally:
            self._code = before
