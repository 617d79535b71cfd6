"""The statements that computed a loss outside all modules, from the stack of its `backward()`, to be run again.

The names of a frame keep their values until the backward. So of its statements only those run again that made a value
from the model's outputs, and no more than its own: no loop, no step of an optimizer, nothing that hands out data.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from itertools import islice
from types import CodeType, FrameType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..recording.observe import observe
from ..recording.walk import leaves
from ..report.record import is_fault
from .patching.code_swap import (
    Probe,
    called_name,
    compiled_with,
    find_target,
    names_in,
    node_of,
    path_to,
)
from .patching.source import FunctionNode, SourceFile, Span, Target
from .provenance import SKIPPED_FILES

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
# Lightning has twenty between the loss and the engine.
_MOST_FRAMES = 32
_RESULT = "__nanwatch_loss__"
# References to a frame's copy of its locals where nobody else has it. Before Python 3.13 `locals()` returns that copy.
_OF_FRAME = 3
# A second call of these, or of an in-place method, would take data, change an optimizer or a list, or write something.
_NOT_TWICE = frozenset({
    "next", "input", "open", "exec", "eval", "print", "anext", "backward", "step", "zero_grad", "append", "extend",
    "insert", "pop", "popleft", "popitem", "remove", "clear", "update", "write", "send", "put", "get_batch",
    "save", "autograd", "grad",
})  # fmt: skip
# Contexts that may be entered once more: they change how PyTorch computes, and end with the block.
_CONTEXTS = frozenset({
    "autocast", "no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "sdpa_kernel", "record_function",
    "nullcontext", "device", "span", "compute_loss_context_manager", "autocast_smart_context_manager",
})  # fmt: skip


class Refused(Exception):  # noqa: N818 - a reason, in words
    """The statements cannot run a second time."""


class _Caller(NamedTuple):
    code: CodeType
    line: int
    # The line and column at which the expression under way ends; Python 3.10 does not tell.
    end: tuple[int | None, int | None]
    names: dict[str, Any]
    globals: dict[str, Any]
    # Parameters as they were handed over, as far as that can be told.
    handed: Mapping[str, Any] = MappingProxyType({})


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
    callers: list[_Caller]
    rng: RngState = field(default_factory=RngState.capture)
    autocast: tuple[Autocast, ...] = field(default_factory=Autocast.capture)
    remark: str = ""  # what the graph tells

    @classmethod
    def capture(cls, since: int, forwards: Sequence[tuple[int, int]]) -> BackwardCall | None:
        """Return the backward under way, None where there are several. The engine may run hooks in its own thread."""
        found = []
        for innermost in sys._current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None and frame.f_code is not _ENGINE:
                frame = frame.f_back
            if frame is not None:
                found.append(frame)
        if len(found) != 1:
            return None
        callers = list(islice(_callers(found[0]), _MOST_FRAMES))
        return cls(found[0].f_locals["t_outputs"], since, forwards, callers)

    def is_behind(self, node: Any) -> bool:
        """Return whether the node of the graph was made from the model's outputs, and by no forward of the model."""
        number = node._sequence_nr()
        return number >= self.since and not any(begin <= number < end for begin, end in self.forwards)

    def statements(self, model: nn.Module) -> LossStatements:
        """Return the statements of the first caller that computed the loss. Raise Refused, with the reason."""
        reason = "the source of the loss was not found"
        for caller, above in zip(self.callers, [*self.callers[1:], None], strict=True):
            file = SourceFile.load(caller.code.co_filename)
            if file is None:
                continue
            caller = caller._replace(handed=_handed(caller, above))
            try:
                if (cut := _cut(caller, file, self.is_behind)) is not None:
                    return LossStatements(model, caller, file, self.is_behind, cut)
            except Refused as error:
                reason = str(error)
                break
        raise Refused(reason)


def _callers(frame: FrameType) -> Iterator[_Caller]:
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
        values = frame.f_locals
        yield _Caller(code, frame.f_lineno, end, dict(values), frame.f_globals)
        if code.co_flags & CO_OPTIMIZED and type(values) is dict and sys.getrefcount(values) == _OF_FRAME:
            values.clear()  # a copy, which Python would keep with the frame


def _handed(caller: _Caller, above: _Caller | None) -> dict[str, Any]:
    """Return the values of the parameters with which `above` called, of those that are names there."""
    file = None if above is None else SourceFile.load(above.code.co_filename)
    top = None if above is None or file is None else _body_of(above, file)
    path = [] if above is None or top is None else path_to(top, above.line)
    call = None if above is None or not path else _call_under_way(path[-1][1], above, caller.code.co_name)
    if above is None or call is None or called_name(call) != caller.code.co_name:
        return {}
    names = caller.code.co_varnames[: caller.code.co_argcount]
    is_method = names[:1] == ("self",) and isinstance(call.func, ast.Attribute)
    pairs = [*zip(names[is_method:], call.args, strict=False), *((x.arg, x.value) for x in call.keywords)]
    return {
        name: above.names[x.id]
        for name, x in pairs
        if name and isinstance(x, ast.Name) and x.id in above.names
    }


class _Cut(NamedTuple):
    body: list[ast.stmt]
    # Names that the statements read, with their values.
    reads: dict[str, Any]
    last_line: int


class LossStatements(nn.Module):
    """The statements as a module, whose call runs them and returns the loss. `inputs` are what they read, by name."""

    def __init__(
        self, model: nn.Module, caller: _Caller, file: SourceFile, is_behind: Callable[[Any], bool], cut: _Cut
    ) -> None:
        super().__init__()
        self.model = model  # so that a re-run of the statements holds its state, and no watch sees its calls
        self.filename = file.name
        self.lines = cut.body[0].lineno, cut.last_line
        self.inputs = {name: cut.reads[name] for name in sorted(cut.reads) if _has_tensor(cut.reads[name])}
        self._cut, self._caller, self._file, self._is_behind = cut, caller, file, is_behind
        self._names = {**caller.globals, **caller.names, **cut.reads}
        self._probe = Probe()
        self._code = compiled_with(ast.Module(cut.body, []), file, (), self._probe)

    def forward(self, **inputs: Any) -> Any:
        """Run the statements with these values of the names they read."""
        self._probe.was_run = True
        names = {**self._names, **inputs}
        exec(self._code, names)
        return names[_RESULT]

    def target(self, filename: str, line: int) -> Target | str:
        """Return the statements as what runs this line, if it is one of theirs; else as `find_target` does."""
        is_own = any(one.lineno <= line <= (one.end_lineno or one.lineno) for one in self._cut.body)
        node = _body_of(self._caller, self._file)
        if filename != self.filename or not is_own or node is None:
            return find_target(filename, line)
        return Target((FunctionType(self._code, self._names),), self._file, node, self.exchanged)

    @contextmanager
    def exchanged(self, file: SourceFile, looks: Sequence[Span], probe: Probe) -> Iterator[None]:
        """Run the same statements of the edited file in the block, as `code_swap.exchanged` does for a function.

        Raises ValueError where the edit changes which statements make the loss.
        """
        cut = _cut(self._caller, file, self._is_behind)
        if cut is None or len(cut.body) != len(self._cut.body):
            raise ValueError("the edit moved the statements")
        before = self._code, self._probe
        self._code, self._probe = compiled_with(ast.Module(cut.body, []), file, looks, probe), probe
        try:
            yield
        finally:
            self._code, self._probe = before


def _body_of(caller: _Caller, file: SourceFile) -> FunctionNode | ast.Module | None:
    """Return the node that the caller's code is compiled from."""
    return file.tree if caller.code.co_name == "<module>" else node_of(file.tree, caller.code)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(x, Tensor) for _, x in leaves(value, ""))


def _cut(caller: _Caller, file: SourceFile, is_behind: Callable[[Any], bool]) -> _Cut | None:
    """Return the statements, with those that made a bad value which has no graph, such as a target, if they may run."""
    with suppress(Refused):
        if (found := _Slice(caller, file, is_behind, follows_bad=True).cut()) is not None:
            return found
    return _Slice(caller, file, is_behind, follows_bad=False).cut()


class _Slice:
    """The statements of one frame that made the values of an expression after the model's forward."""

    def __init__(
        self, caller: _Caller, file: SourceFile, is_behind: Callable[[Any], bool], *, follows_bad: bool
    ) -> None:
        self._caller = caller
        self._file = file
        self._is_behind = is_behind
        self._follows_bad = follows_bad
        self._reads: dict[str, Any] = {}
        # The names that a statement after the present one binds: their values are no longer those that it read.
        self._bound: set[str] = set()
        # The names of which a statement sets an item.
        self._filled: set[str] = set()

    def cut(self) -> _Cut | None:
        """Return the statements; None where the frame was only handed the loss."""
        top = _body_of(self._caller, self._file)
        if top is None or isinstance(top, ast.Lambda):
            return None
        path = path_to(top, self._caller.line)
        value = None if not path else self._expression(path[-1][1])
        if value is None:
            return None
        is_computed = any(isinstance(one, ast.Call | ast.BinOp) for one in ast.walk(value))
        needed = self._read(value)
        statement = path[-1][1]
        result = ast.copy_location(ast.Assign([ast.Name(_RESULT, ast.Store())], value), statement)
        body: list[ast.stmt] = [result]
        for block, inner in reversed(path):
            before = block[: block.index(inner)]
            made, needed = self._block(before, needed)
            body = [*made, *body]
            if not needed:
                break
        handed = {
            name: x for name, x in self._caller.handed.items() if name in needed and not self._is_made(x)
        }
        self._reads.update(handed)
        if needed - handed.keys() or (len(body) == 1 and not is_computed):
            return None
        self._refuse_twice(value)
        return _Cut(body, self._reads, statement.end_lineno or statement.lineno)

    def _expression(self, statement: ast.stmt) -> ast.expr | None:
        """Return the loss in the call under way: what has the method `backward`, else the arguments."""
        call = _call_under_way(statement, self._caller, "backward")
        if call is None:
            return None
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            owner = call.func.value
            if not call.args or self._read(owner) or any(isinstance(x, ast.Call) for x in ast.walk(owner)):
                return owner
        given = [one for one in call.args if not isinstance(one, ast.Starred)]
        given += [one.value for one in call.keywords if one.arg is not None]
        wanted = [one for one in given if self._read(one)]
        return wanted[0] if len(wanted) == 1 else None

    def _read(self, *nodes: ast.AST) -> set[str]:
        """Return the names in these nodes that earlier statements have to make. Keep those that have their values."""
        values, found = self._caller.names, set()
        for name in {name for node in nodes for name in names_in(node, ast.Load)}:
            is_gone = name not in values and name in self._caller.code.co_varnames
            if name in self._bound or is_gone or self._is_made(values.get(name)):
                found.add(name)
            elif name in values:
                self._reads[name] = values[name]
        return found

    def _is_made(self, value: Any) -> bool:
        """Return whether the value was computed from the model's outputs, or is bad and its statement is sought."""
        tensors = [x for _, x in leaves(value, "") if isinstance(x, Tensor)]
        if any(x.grad_fn is not None and self._is_behind(x.grad_fn) for x in tensors):
            return True
        return self._follows_bad and any(
            not x.requires_grad and is_fault(observe(x, "", "output")) for x in tensors
        )

    def _block(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return those of the statements that make the needed names, and the names that they need themselves."""
        body: list[ast.stmt] = []
        for one in reversed(statements):
            # Also those of which it sets an item.
            names = names_in(one, ast.Store) | {
                name
                for x in ast.walk(one)
                if isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Store)
                for name in names_in(x.value, ast.Load)
            }
            self._bound |= names
            if names & needed:
                kept, needed = self._statement(one, needed)
                body = [*kept, *body]
        return body, needed

    def _statement(self, one: ast.stmt, needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            plain = self._bind(one, targets)
            self._refuse_twice(one.value)
            # Without an annotation, which a function does not evaluate.
            made = ast.copy_location(ast.Assign([*targets], one.value), one)
            return [made], (needed - plain) | self._read(one.value)
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            self._refuse_twice(one.value)
            # Not in place: the tensor or the list may be the program's.
            left = ast.copy_location(ast.Name(one.target.id, ast.Load()), one.target)
            value = ast.copy_location(ast.BinOp(left, one.op, one.value), one)
            made = ast.copy_location(ast.Assign([one.target], value), one)
            return [made], needed | {one.target.id} | self._read(one.value)
        if isinstance(one, ast.With):
            contexts = [item.context_expr for item in one.items]
            if any(not isinstance(x, ast.Call) or called_name(x) not in _CONTEXTS for x in contexts):
                raise self._refused(one)
            body, needed = self._block(one.body, needed)
            return [ast.copy_location(ast.With(one.items, body), one)], needed | self._read(*contexts)
        if isinstance(one, ast.If):
            self._refuse_twice(one.test)
            body, first = self._branch(one.body, needed)
            others, second = self._branch(one.orelse, needed)
            chosen = ast.If(one.test, body or [ast.copy_location(ast.Pass(), one)], others)
            return [ast.copy_location(chosen, one)], first | second | self._read(one.test)
        raise self._refused(one)

    def _bind(self, one: ast.Assign | ast.AnnAssign, targets: Sequence[ast.expr]) -> set[str]:
        """Return the names that an assignment binds. Its items have to be of a dict or a list that is made anew."""
        plain: set[str] = set()
        for target in targets:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                self._filled.add(target.value.id)
            elif isinstance(target, ast.Name | ast.Tuple | ast.List):
                plain |= names_in(target, ast.Store)
            else:
                raise self._refused(one)
        is_new = isinstance(one.value, ast.Dict | ast.List | ast.DictComp | ast.ListComp)
        if plain & self._filled and not is_new:
            raise self._refused(one)
        return plain

    def _branch(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return the block; one that may not run twice raises instead, as the condition may choose the other."""
        try:
            return self._block(statements, needed)
        except Refused as reason:
            return ast.parse(f"raise RuntimeError({str(reason)!r})").body, needed

    def _refuse_twice(self, *nodes: ast.AST) -> None:
        for node in nodes:
            for one in ast.walk(node):
                name = called_name(one) if isinstance(one, ast.Call) else ""
                is_once = isinstance(one, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
                if is_once or name in _NOT_TWICE or name.endswith("_"):
                    raise self._refused(one)

    def _refused(self, node: ast.AST) -> Refused:
        line = getattr(node, "lineno", 0)
        return Refused(f"line {line} of {self._caller.code.co_filename} should not run a second time")


def _call_under_way(statement: ast.stmt, caller: _Caller, name: str) -> ast.Call | None:
    """Return the call of the statement that has not returned; without its place, the only one of this name."""
    calls = [one for one in ast.walk(statement) if isinstance(one, ast.Call)]
    if caller.end[0] is not None:
        calls = [one for one in calls if (one.end_lineno, one.end_col_offset) == caller.end]
    else:
        calls = [one for one in calls if called_name(one) == name]
    return calls[0] if len(calls) == 1 else None
