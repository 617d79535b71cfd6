"""Statements of a function of the program, to be run again: those that made a loss, or gradients for a step.

The names of a frame keep their values. So only those statements run again that bind or fill a value with a graph, as
it is gone, or a bad one: no step of an optimizer, nothing that hands out data. Gradients that became bad behind a
backward need its statement, and all between that and the step.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ..instrumentation.execution_context import Autocast, RngState
from ..recording.observe import observe
from ..recording.walk import leaves
from ..util.program_code import SKIPPED_FILES, frame_values
from . import isolation
from .causes import tensors_in
from .patching import source
from .provenance import ENGINE, Expression

# Lightning has twenty between the loss and the engine.
_MOST_FRAMES = 32
# The lines of frames, by their addresses and codes.
Lines: TypeAlias = dict[tuple[int, CodeType], int]
# Blocks down to a statement, each with its statement that covers that.
_Path: TypeAlias = list[tuple[list[ast.stmt], ast.stmt]]
_RESULT = "__nanwatch_loss__"
# A second call of these would take data, change an optimizer, or write something.
_NOT_TWICE = frozenset({
    "next", "input", "open", "exec", "eval", "print", "anext", "backward", "step", "zero_grad", "write", "send",
    "get_batch", "save",
})  # fmt: skip
# Methods that change what they are called on, beside those of tensors that end in an underscore.
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "sort", "pop"})
_JUMPS = ast.Break | ast.Continue | ast.Return


class Refused(Exception):  # noqa: N818 - a reason, in words
    """The statements cannot run a second time."""


class _Reached(BaseException):
    """The step of an optimizer that the statements lead to, which is not taken."""


class Caller(NamedTuple):
    """A function of the program that is under way at a line, and has called what leads to the backward or the step.

    `names` are its own, behind which its caller has those of its parameters, as it may have deleted them. `since`: the
    line of the backward before a step.
    """

    code: CodeType
    line: int
    names: ChainMap[str, Any]
    globals: dict[str, Any]
    since: int = 0


@dataclass(slots=True)
class ProgramCall:
    """A call by the program of a backward or of an optimizer's step, and its callers, the innermost first.

    `rngs` are random states from which the statements may have begun: that of the last step of an optimizer, that of
    the model's first call, as data may be drawn between the two, and the present one. `is_bad`: the loss itself is.
    `between`: the lines between which a gradient became bad.
    """

    callers: list[Caller]
    rngs: Sequence[RngState] = ()
    is_bad: bool = False
    autocast: tuple[Autocast, ...] = field(default_factory=Autocast.capture)
    between: str = ""

    @classmethod
    def of_backward(cls, rngs: Sequence[RngState]) -> ProgramCall | None:
        """Return the backward under way, None where it is not known. `rngs`: random states of before it."""
        if (frame := _engine_frame()) is None:
            return None
        roots = frame.f_locals["tensors" if frame.f_code is ENGINE[0] else "t_outputs"]  # or edges
        is_bad = any(observe(x.detach(), "", "output").is_fault for x in roots if isinstance(x, Tensor))
        return cls(_callers(frame), [*rngs, RngState.capture()], is_bad)

    @classmethod
    def of_step(cls, lines: Lines) -> ProgramCall | None:
        """Return the step under way in the function that made the latest backward too, which had these `lines`."""
        for frame in _program_frames(sys._getframe(1)):
            since = lines.get((id(frame), frame.f_code), frame.f_lineno)
            if since != frame.f_lineno:  # else the step is given a closure, which has made the backward
                words = f"backward() at line {since} and the step at line {frame.f_lineno}"
                between = f"look between the {words} of {frame.f_code.co_filename}"
                return cls([_callers(frame)[0]._replace(since=since)], [RngState.capture()], between=between)
        return None

    def statements(self, model: nn.Module, *, keeps_outputs: bool = False) -> Iterator[LossStatements]:
        """Yield for each caller the statements that led to the call. Raises Refused, with the reason.

        keeps_outputs: the model is not called again, and the names of its outputs keep their values.
        """
        kept = model if keeps_outputs else None
        for caller in self.callers:
            file = source.SourceFile.load(caller.code.co_filename)
            if file is not None and (part := _part_of(caller, file, kept)) is not None:
                yield LossStatements(model, caller, file, part)


def backward_under_way() -> tuple[Tensor | None, Lines]:
    """Return the loss of the backward under way, None where it is no single number, and the lines of its callers."""
    if (frame := _engine_frame()) is None:
        return None, {}
    lines = {(id(x), x.f_code): line for x, line in islice(walk_stack(frame), _MOST_FRAMES)}  # 0.1 µs each
    roots: Any = frame.f_locals.get("tensors", ()) if frame.f_code is ENGINE[0] else ()
    loss = roots[0] if len(roots) == 1 else None
    is_number = isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
    return loss if is_number else None, lines


def _engine_frame() -> FrameType | None:
    """Return the frame that runs this thread's backward; in a thread of the engine, the only one there is."""
    if (frame := _engine_of(sys._getframe(1))) is not None:
        return frame
    frames = [*filter(None, map(_engine_of, sys._current_frames().values()))]
    return frames[0] if len(frames) == 1 else None


def _engine_of(frame: FrameType) -> FrameType | None:
    return next((x for x, _ in walk_stack(frame) if x.f_code in ENGINE), None)


def _program_frames(frame: FrameType) -> list[FrameType]:
    frames = (x for x, _ in walk_stack(frame) if not x.f_code.co_filename.startswith(SKIPPED_FILES))
    return [*islice(frames, _MOST_FRAMES)]


def _callers(top: FrameType) -> list[Caller]:
    callers, values = list[Caller](), dict[str, Any]()
    for frame in reversed(_program_frames(top)):
        code, outer, values = frame.f_code, values, frame_values(frame)
        handed = {name: outer[name] for name in code.co_varnames[: code.co_argcount] if name in outer}
        callers.append(Caller(code, frame.f_lineno, ChainMap(values, handed), frame.f_globals))
    return callers[::-1]


def _part_of(caller: Caller, file: source.SourceFile, kept: nn.Module | None) -> _Part | None:
    """Return the statements that led to the call under way; None where the frame was only handed what they made."""
    top = source.node_of(file, caller.code)
    paths = [] if top is None else [*source.paths_to(top, caller.line)]
    if top is None or not caller.since:
        parts = (_Part(caller, path, kept) for path in paths)
    elif isolation.is_child():
        pairs = ((x, _between(x, path)) for x in source.paths_to(top, caller.since) for path in paths)
        parts = (_Part(caller, since, kept, following) for since, following in pairs if following)
    else:
        raise Refused("the backward runs a second time in a process of its own alone")
    return next((part for part in parts if part.body), None)


def _between(since: _Path, path: _Path) -> list[list[ast.stmt]]:
    """Return, by block, what follows the last statement of one path, up to that which leads to the other's last."""
    for depth, ((block, first), (_, last)) in enumerate(zip(since, path, strict=False)):
        if first is not last:
            inner, after = [x[x.index(y) + 1 :] for x, y in since[:depth:-1]], block[block.index(first) + 1 :]
            return [*inner, after[: after.index(last) + 1]] if last in after else []
    return []


class _Part:
    """Statements of a function before its call, found from there backwards by the names that they have to make.

    `body`: they bind the loss to `_RESULT`, or end with the call; [] where they make nothing. `reads`: values of the
    names that they read. `is_whole`: they make all that has a graph. Else a parameter of the function has one that its
    caller has made. `kept`: the model whose calls are left out, if any: the names of their results keep their values.
    `following`: statements behind a backward, up to the call of a step. `data`: bad values that have no graph, by name.
    """

    def __init__(
        self, caller: Caller, path: _Path, kept: nn.Module | None, following: Sequence[list[ast.stmt]] = ()
    ) -> None:
        self._caller, self._values, self.kept = caller, caller.names, kept
        self.body: list[ast.stmt] = []
        self.reads: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self._unknown = set[str]()  # names without a value, as those that an edit has added
        # Names that a later statement binds: their values are no longer those that an earlier one read.
        self._bound = {name for x in chain(*following) for name in source.names_in(x, ast.Store)}
        statement = last = path[-1][1]
        made: ast.AST | None = statement if following else self._loss_in(statement)
        if made is None:
            return
        if isinstance(made, ast.expr):
            self._refuse_twice(made)
            last = ast.copy_location(ast.Assign([ast.Name(_RESULT, ast.Store())], made), statement)
        needed, body = self._read(made), [last]
        for block, inner in reversed(path):
            before, needed = self._block(block[: block.index(inner)], needed)
            body = [*before, *body]
        is_computed = len(body) > 1 or any(isinstance(x, ast.Call | ast.BinOp) for x in ast.walk(made))
        body += [self._once(statements) for statements in following if statements]
        if is_computed and not needed - self._values.keys():
            # A bad parameter, one with a graph, and a list or dict of others that these statements fill.
            known = {name: self._values[name] for name in needed}
            self.is_whole = not any(_has_graph(x) for x in known.values() if not isinstance(x, list | dict))
            self.body, self.reads = body, self.reads | known

    def _once(self, statements: Sequence[ast.stmt]) -> ast.stmt:
        """Return the statements as a loop of one turn, which they may leave. Counters have counted already."""
        counters = [x for x in statements if isinstance(x, ast.AugAssign)]
        counted = [x for x in counters if isinstance(self._value_of(x.target), int | float)]
        body = [x for x in statements if x not in counted] or [ast.Pass()]
        loop = ast.For(ast.Name(_RESULT, ast.Store()), ast.Tuple([ast.Constant(0)], ast.Load()), body, [])
        return ast.copy_location(loop, statements[-1])

    def _loss_in(self, statement: ast.stmt) -> ast.expr | None:
        """Return the loss: what has the method `backward`, else the only made argument of a call."""
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                owner = call.func.value
                is_call = any(isinstance(x, ast.Call) for x in ast.walk(owner))
                if not call.args or is_call or self._read(owner):
                    return owner
        arguments = [x for call in calls for x in (*call.args, *(keyword.value for keyword in call.keywords))]
        made = [argument for argument in arguments if self._read(argument)]
        return made[0] if len(made) == 1 else None

    def _read(self, node: ast.AST) -> set[str]:
        """Return the names in the node that earlier statements have to make. Keep the values of the others."""
        needed = set()
        for name in source.names_in(node, ast.Load):
            value = self._values.get(name)
            tensors = _tensors(value)
            # A statement may have bound a deleted parameter anew, as Trainer's does that prepares the inputs.
            is_gone = name in self._caller.code.co_varnames and name not in self._values.maps[0]
            # A module keeps its weights: made anew, it would have others.
            is_bound = name in self._bound and not isinstance(value, nn.Module)
            # The statement that made a bad value is sought, unless samples are. Weights have none.
            is_bad = self.kept is None and any(
                not x.requires_grad and observe(x, "", "output").is_fault for x in tensors
            )
            self.data |= {name: value} if is_bad else {}
            if is_gone or is_bound or is_bad or any(x.grad_fn is not None for x in tensors):
                needed.add(name)
            elif name in self._values:
                self.reads[name] = value
            elif name not in self._caller.globals:
                self._unknown.add(name)
        return needed

    def _block(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return those of the statements that make the needed names, and the names that they need themselves."""
        body: list[ast.stmt] = []
        for statement in reversed(statements):
            later, bound = set(self._bound), source.names_in(statement, ast.Store)
            filled = self._filled(statement, needed)
            wanted = bound & (needed | self._unknown) | filled
            # The statements of a block bind one after the other, those of a loop in any order.
            if not wanted or not isinstance(statement, ast.With | ast.Try | ast.If):
                self._bound |= bound | filled
            if not wanted:
                continue
            is_kept = self._calls_kept(statement)
            try:
                if is_kept:
                    raise self._refused(statement)
                made = {name for name in filled if not isinstance(self._values.get(name), nn.Module)}
                kept, needed = self._statement(statement, needed | made)
            except Refused as reason:
                values = {name: self._values[name] for name in wanted & self._values.keys()}
                is_graph = not is_kept and any(map(_has_graph, values.values()))
                is_lost = wanted & later or wanted - values.keys() or is_graph
                # Bad data stays as it was handed out. A branch that is not taken may have what is lost.
                if not is_lost:
                    self.reads |= values
                stand_in = f"raise RuntimeError({str(reason)!r})" if is_lost else "pass"
                kept, needed = ast.copy_location(ast.parse(stand_in).body[0], statement), needed - wanted
            self._bound |= bound | filled
            body = [kept, *body]
        return body, needed

    def _filled(self, statement: ast.stmt, needed: set[str]) -> set[str]:
        """Return those of the needed and the read names whose values the statement changes in place.

        A tensor or a module that is only read already holds its changes. They are not repeated.
        """
        read = {name: self._values.get(name) for name in self.reads.keys() - needed}
        modules = {name for name, value in read.items() if isinstance(value, nn.Module)}
        objects = {name for name, value in read.items() if not isinstance(value, Tensor | nn.Module)}
        return _filled_by(statement) & (needed | objects) | _filled_by(statement, plainly=True) & modules

    def _statement(self, statement: ast.stmt, needed: set[str]) -> tuple[ast.stmt, set[str]]:
        """Return the statement as it runs again, and the names that have to be made before it."""
        made: Any = copy.copy(statement)
        header: list[ast.AST] = [statement]
        if isinstance(statement, ast.With):
            made.body, needed = self._block(statement.body, needed)
            header = [item.context_expr for item in statement.items]
        elif isinstance(statement, ast.Try):  # whose body raised nothing
            body, needed = self._block([*statement.body, *statement.orelse], needed)
            made, header = ast.copy_location(ast.If(ast.Constant(True), body, []), statement), []
        elif isinstance(statement, ast.If):
            body, first = self._block(statement.body, needed)
            made.orelse, second = self._block(statement.orelse, needed)
            made.body, header = body or [ast.copy_location(ast.Pass(), statement)], [statement.test]
            needed = first | second
        # A DataLoader would hand out other data, and an iterator would be further on than before.
        elif isinstance(statement, ast.For) and not any(
            isinstance(self._value_of(x), Iterator | DataLoader) for x in ast.walk(statement.iter)
        ):
            # A second time, as an iteration reads what an earlier one has made.
            body, needed = self._block(statement.body, needed | self._block(statement.body, needed)[1])
            if statement.orelse or any(isinstance(x, _JUMPS) for x in ast.walk(statement)):
                self._refuse_twice(statement)
            else:
                made.body = body
            needed, header = needed - source.names_in(statement.target, ast.Store), [statement.iter]
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
            needed = needed - source.names_in(statement, ast.Store)
        elif not isinstance(statement, ast.AugAssign):
            raise self._refused(statement)
        self._refuse_twice(*header)
        return made, needed.union(*map(self._read, header))

    def _calls_kept(self, statement: ast.stmt) -> bool:
        """Return whether the statement assigns what a call of the kept model, or of a part of it, returned."""
        modules = [] if self.kept is None or not isinstance(statement, ast.Assign) else self.kept.modules()
        callees = [self._value_of(x.func) for x in ast.walk(statement) if isinstance(x, ast.Call)]
        return any(module is callee for module in modules for callee in callees[:1])  # the outermost

    def _value_of(self, node: ast.AST) -> Any:
        """Return the value of `name` or `name.attribute`, None where it is not known."""
        if isinstance(node, ast.Name):
            return self._values.get(node.id, self._caller.globals.get(node.id))
        if not isinstance(node, ast.Attribute):
            return None
        owner = getattr(self._value_of(node.value), "__dict__", {})
        return {**owner, **owner.get("_modules", {})}.get(node.attr)

    def _refuse_twice(self, *nodes: ast.AST) -> None:
        for node in (inner for top in nodes for inner in ast.walk(top)):
            is_once = isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
            if is_once or (isinstance(node, ast.Call) and source.called_name(node) in _NOT_TWICE):
                raise self._refused(node)

    def _refused(self, node: Any) -> Refused:
        return Refused(f"line {node.lineno} of {self._caller.code.co_filename} should not run a second time")


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value, those of a distribution included: it holds tensors of a graph that is gone."""
    return [x for _, x in leaves(value, "", isinstance(value, Distribution)) if isinstance(x, Tensor)]


def _has_graph(value: Any) -> bool:
    return any(x.grad_fn is not None for x in _tensors(value))


def _filled_by(statement: ast.stmt, plainly: bool = False) -> set[str]:
    """Return the names whose values the statement changes in place: `p.clamp_()`, `s.den = x`, `losses["a"] = x`.

    `plainly` leaves those that an assignment with an operator, or a method, changes.
    """
    filled = set[str]()
    steps = {id(x.target) for x in ast.walk(statement) if isinstance(x, ast.AugAssign)} if plainly else set()
    for node in ast.walk(statement):
        if plainly and (id(node) in steps or isinstance(node, ast.Call)):
            continue
        name, owner = source.called_name(node), node.func if isinstance(node, ast.Call) else node
        is_method = isinstance(owner, ast.Attribute) and owner is not node
        is_change = is_method and (name in _CHANGES or (name.endswith("_") and not name.endswith("__")))
        if is_change or isinstance(getattr(node, "ctx", None), ast.Store):
            while isinstance(owner, ast.Attribute | ast.Subscript):
                owner = owner.value
            filled |= {owner.id} if isinstance(owner, ast.Name) and not isinstance(node, ast.Name) else set()
    return filled


def _raise(error: BaseException, *_: Any, **__: Any) -> None:
    raise error


class LossStatements(nn.Module):
    """The statements as a module, whose call runs them. `inputs` are what they read, by name.

    A call returns the loss, if they make one, and the outputs of the model's calls, these without a graph; of
    statements that lead to a step the gradients that it would take.
    """

    def __init__(self, model: nn.Module, caller: Caller, file: source.SourceFile, part: _Part) -> None:
        super().__init__()
        self.model = model
        self.is_whole, self.data = part.is_whole, part.data
        first, last = part.body[0].lineno, part.body[-1].end_lineno or 0
        self._lines = range(first, last + 1)
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        self.where = f"{lines} of {file.name}"
        self._names = {**caller.globals, **caller.names, **part.reads}
        tree = ast.Module(part.body, [])
        mentioned = [self._names.get(name) for name in source.names_in(tree, ast.Load)]
        for function in [x for x in mentioned if isinstance(x, FunctionType)]:
            with suppress(ValueError):  # of a name that its outer function has deleted
                mentioned += chain(*(x.values() for x in inspect.getclosurevars(function)[:2]))
        mentioned += [y for x in part.reads.values() for y in getattr(x, "__dict__", {}).values()]
        # A re-run puts back the state of all modules that the statements call, and no watch sees their calls.
        self.modules_read = nn.ModuleList(x for x in mentioned if isinstance(x, nn.Module))
        self._generators = [x for x in mentioned if isinstance(x, torch.Generator)]
        self._scalers = [x for x in mentioned if isinstance(x, torch.amp.GradScaler)]
        # `self` is the module in a call of it. Weights stay what they are: a run makes leaves of its inputs.
        reads = sorted({*part.reads} - {"self"})
        kinds = {name: [*map(type, tensors_in(part.reads[name]))] for name in reads}
        self.inputs = {name: part.reads[name] for name, x in kinds.items() if x and nn.Parameter not in x}
        self._caller, self._file, self._kept = caller, file, part.kept
        self._filled = set().union(*map(_filled_by, part.body))
        self._code = source.compiled_with(tree, file, (), source.Probe())

    def forward(self, **inputs: Any) -> Any:
        """Run the statements with these values of the names they read."""
        names, outputs = {**self._names, **inputs}, list[Tensor]()
        # A list or a dict that the statements fill is the program's.
        for name in self._filled & names.keys():
            if isinstance(names[name], list | dict | set):
                names[name] = copy.copy(names[name])
        with ExitStack() as stack:
            if not isolation.is_child():  # it would add to gradients that the program is about to use
                refused = Refused("a function that the statements call makes a backward of its own")
                refuse = partial(_raise, refused)
                stack.enter_context(isolation.in_place_of(torch.autograd, "backward", refuse))
            for generator in self._generators:
                stack.callback(generator.set_state, generator.get_state())
            hook = self.model.register_forward_hook(lambda *call: outputs.extend(tensors_in(call[-1])))
            stack.callback(hook.remove)
            if not self._caller.since:
                exec(self._code, names)
                return names[_RESULT], [x.detach() for x in outputs]
            stack.callback(register_optimizer_step_pre_hook(partial(_raise, _Reached())).remove)
            self.model.zero_grad()
            for scaler in self._scalers:  # which unscales no gradients twice
                with suppress(AssertionError):  # of one that has unscaled none
                    scaler.update()
            with suppress(_Reached):
                exec(self._code, names)
        return [x.grad for x in self.model.parameters() if x.grad is not None]

    def target(self, place: Expression) -> source.Target | str:
        """Return the statements as what runs a line, if it is one of theirs; else as `find_target` does."""
        node = source.node_of(self._file, self._caller.code)
        if place.filename != self._file.name or place.line not in self._lines or node is None:
            return source.find_target(place)
        return source.Target((FunctionType(self._code, self._names),), self._file, node, self.exchanged)

    @contextmanager
    def exchanged(
        self, file: source.SourceFile, looks: Sequence[source.Span], probe: source.Probe
    ) -> Iterator[None]:
        """Run the same statements of the edited file in the block, as `source.exchanged` does for a function.

        Raises ValueError where the edit moved the statements.
        """
        # A line that was added stands before the backward.
        caller, old, new = self._caller, self._file.text.split("\n"), file.text.split("\n")
        added = len(new) - len(old)
        since = caller.since + added * (new[: caller.since] != old[: caller.since])
        part = _part_of(caller._replace(line=caller.line + added, since=since), file, self._kept)
        if part is None:
            raise ValueError("the edit moved the statements")
        before, self._code = self._code, source.compiled_with(ast.Module(part.body, []), file, looks, probe)
        try:
            yield
        finally:
            self._code = before
