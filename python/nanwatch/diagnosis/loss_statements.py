"""Statements of a function of the program, run again: those that made a loss, or will do so.

A cure of a forward that failed is tried up to the loss behind it, by the statements that the program has not come to
yet.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from traceback import walk_stack
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.execution_context import Autocast, RngState
from ..recording.observe import observe
from ..report.finding import Place
from ..util.messages import spell
from ..util.program import SKIPPED_FILES, frame_values, is_library, nodes_behind, parameters_of
from . import isolation
from .batch_snapshot import BatchSnapshot
from .causes import tensors_in
from .experiment import UNTRIED, LossModule
from .patching import source
from .provenance import ENGINE, Expression, positions_of
from .statements import LOSS, RETURN, VALUE, Caller, Part, calls_in, filled_by, is_backward, part_of

# Lightning has twenty between the loss and the engine.
_MOST_FRAMES = 32


class _Returned(BaseException):
    """The end of the statements of a function, with what it returns."""


class _Reached(BaseException):
    """The loss of a backward, at which all statements end."""


@dataclass(slots=True)
class ProgramCall:
    """A call of a backward by the program, and its callers, the innermost first.

    `rngs` are random states from which the statements may have begun: that of the last step of an optimizer, that of
    the model's first call, as data may be drawn between the two, and the present one. `is_bad`: the loss itself is.
    """

    callers: list[Caller]
    rngs: Sequence[RngState] = ()
    is_bad: bool = False
    autocast: tuple[Autocast, ...] = field(default_factory=Autocast.capture)

    @classmethod
    def of_backward(cls, rngs: Sequence[RngState]) -> ProgramCall | None:
        """Return the backward under way, None where it is not known. `rngs`: random states of before it."""
        if (frame := _engine_frame()) is None:
            return None
        roots = frame.f_locals["tensors" if frame.f_code is ENGINE[0] else "t_outputs"]  # or edges
        is_bad = any(observe(x.detach(), "", "output").is_fault for x in roots if isinstance(x, Tensor))
        return cls(_callers(frame), [*rngs, RngState.capture()], is_bad)

    @classmethod
    def before_step(cls, rngs: Sequence[RngState]) -> ProgramCall | None:
        """Return the latest backward before the step under way, where one function makes both; else None."""
        backwards = _backwards_before(sys._getframe(1))
        callers = [caller._replace(line=line, positions=None) for caller, line in backwards]
        return cls(callers, [*rngs, RngState.capture()]) if callers else None

    def statements(self, model: nn.Module, *, keeps_outputs: bool = False) -> Iterator[LossStatements]:
        """Yield for each caller the statements that led to the call.

        keeps_outputs: the model is not called again, and the names of its outputs keep their values.
        """
        kept = model if keeps_outputs else None
        for caller in self.callers:
            file, _ = caller.source()
            if file is not None and (part := part_of(caller, file, kept)) is not None:
                yield LossStatements(model, caller, file, part)


def backward_under_way() -> Tensor | None:
    """Return the loss of the backward under way, None where it is no single number."""
    frame = _engine_frame()
    roots: Any = frame.f_locals.get("tensors", ()) if frame is not None and frame.f_code is ENGINE[0] else ()
    loss = roots[0] if len(roots) == 1 else None
    is_number = isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
    return loss if is_number else None


def around_gradients() -> list[str]:
    """Return a sentence with the lines of the latest backward and the step under way, if one function makes both."""
    pairs = [(x, line) for x, line in _backwards_before(sys._getframe(1)) if line != x.line]
    words = "look between the backward() at line {1} and the step at line {0.line} of {0.code.co_filename}"
    return [words.format(*pair) for pair in pairs[:1]]  # a step that is given a closure makes the backward


def _backwards_before(top: FrameType) -> Iterator[tuple[Caller, int]]:
    """Yield the functions under way that make a backward at or before the line that they are at, and its line."""
    for caller in _callers(top):
        lines = [x.lineno for x in ast.walk(caller.source()[1]) if is_backward(x)]
        if before := [line for line in lines if line <= caller.line]:
            yield caller, max(before)


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
        names, positions = ChainMap(values, handed), positions_of(frame)
        callers.append(Caller(code, frame.f_lineno, names, frame.f_globals, {}, positions))
    return callers[::-1]


def _raise(error: BaseException, *_: Any, **__: Any) -> None:
    raise error


def place_of_step(weight: Tensor | None) -> Place | None:
    """Return where the program steps the optimizer that holds the weight; without one the optimizer that steps now.

    None where no line is known, or several are.
    """
    for caller in _callers(sys._getframe(1)):
        (file, top), lines = caller.source(), set[int]()
        for call in (x for _, _, x in calls_in(top) if source.called_name(x) == "step"):
            values = map(caller.value_of, (getattr(call.func, "value", call), *call.args))
            optimizers = [x for x in values if isinstance(x, Optimizer)]
            holds = any(x is weight for optimizer in optimizers for x in parameters_of(optimizer))
            if holds if weight is not None else optimizers and call.lineno == caller.line:
                lines.add(call.lineno)
        if file is not None and lines:
            return Place(file.name, lines.pop()) if len(lines) == 1 else None
    return None


def with_loss(batch: BatchSnapshot, model: nn.Module, depth: int = -1) -> BatchSnapshot | None:
    """Return the batch with the statements behind its call, up to a backward; as it is where none is known.

    With a depth the statements of that caller, the innermost is 0, make the arguments too, and those of the callers
    inside it lead on from there. Then None where they make none.
    """
    chosen = level = None
    has_loss = False
    for number, caller in enumerate(_callers(sys._getframe(1)) if isolation.is_child() else ()):
        makes_arguments, (file, top) = number <= depth, caller.source()
        is_over = is_library(caller.code.co_filename) if makes_arguments else has_loss or not batch.grad
        if is_over or file is None or (span := file.at(caller.positions)) is None:
            break
        calls = ((text, number) for text, number, call in calls_in(top) if file.span(call) == span)
        around = next(calls, ("", 0))
        caller = caller._replace(around=around, makes_arguments=makes_arguments)
        if (part := part_of(caller, file)) is None or (number == depth and not part.makes_arguments):
            break
        given = tensors_in((batch.args, batch.kwargs))
        level = LossStatements(model, caller, file, part, batch.module, level, given)
        has_loss = has_loss or part.has_backward
        if number == depth:
            batch = replace(batch, args=(), kwargs=level.inputs, versions=(), draws=[])
        chosen = level if number == depth or (number > depth and has_loss) else chosen
    if chosen is None:
        return batch if depth < 0 else None
    return replace(batch, module=chosen)


class LossStatements(LossModule):
    """The statements as a module, whose call runs them. `inputs` are what they read, by name.

    A call returns the loss, if they make one, and the outputs of the model's calls, these without a graph. Those around
    a call make it: of `called`, or of the function that the `inner` statements are in. `untried` says in words that the
    latest call made no loss.
    """

    def __init__(
        self,
        model: nn.Module,
        caller: Caller,
        file: source.SourceFile,
        part: Part,
        called: nn.Module | None = None,
        inner: LossStatements | None = None,
        given: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self.model, self.called, self.inner, self.untried = model, called, inner, ""
        self._given, self._nodes = [*given], set[Any]()  # of the call that they are around
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
        # `self` is the module in a call of it. Weights stay what they are: a run makes leaves of its inputs.
        reads = sorted({*part.reads} - {"self"})
        kinds = {name: [*map(type, tensors_in(part.reads[name]))] for name in reads}
        self.inputs = {name: part.reads[name] for name, x in kinds.items() if x and nn.Parameter not in x}
        self._caller, self._file, self._kept = caller, file, part.kept
        self._filled = filled_by(tree)
        self._code = source.compiled_with(tree, file, (), source.Probe())

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the statements with these values of the names they read, or behind a call with these arguments."""
        outputs = list[Any]()
        with ExitStack() as stack:
            if not isolation.is_child():  # it would add to gradients that the program is about to use
                refused = RuntimeError("a function that the statements call makes a backward of its own")
                stand_in = isolation.in_place_of(torch.autograd, "backward", partial(_raise, refused))
                stack.enter_context(stand_in)
            model = self.model if self.called is None else self.called
            stack.callback(model.register_forward_hook(lambda *call: outputs.append(call[-1])).remove)
            if self.called is None:
                return self.run(inputs), [x.detach() for x in tensors_in(outputs)]
            self.untried = UNTRIED
            try:
                self.run(inputs, args)
            except _Reached as reached:
                self.untried = ""
                return [x.detach() for x in tensors_in(outputs[-1])], *reached.args
            except Exception as error:
                if not outputs:
                    raise
                self.untried += f", as it raised {spell(error)}"
            return outputs[-1]

    def run(self, inputs: Mapping[str, Any], args: Sequence[Any] = ()) -> Any:
        """Run the statements, with these values of their names, and return what they end with.

        Those that make no arguments of the call that they are around give it these `args` and `inputs`.
        """
        leads_on = self._caller.around is not None and not self._caller.makes_arguments

        def value(function: Any = None, /, *made: Any, **named: Any) -> Any:
            called: Any = function if isinstance(function, nn.Module) else self.called
            if leads_on:
                made, named = tuple(args), {**inputs}
            elif self.inner is not None:  # gets its parameters by name
                signature = inspect.signature(getattr(function, "forward", function))
                made, named = (), signature.bind(*made, **named).arguments
            result = called(*made, **named) if self.inner is None else self.inner.run(named, made)
            self._nodes = {x.grad_fn for x in tensors_in(result)} - {None}
            return result

        names = {**self._names, **({} if leads_on else inputs)}
        names |= {VALUE: value, LOSS: self._reach, RETURN: _Returned}
        if leads_on:
            # The loss may differentiate by what the model was given, as that of a physics-informed one does.
            given = dict(zip(map(id, self._given), tensors_in((args, dict(inputs))), strict=False))
            names |= {name: given[id(x)] for name, x in names.items() if id(x) in given}
        # The statements may fill containers of the program, so they get copies.
        for name in self._filled & names.keys():
            if isinstance(names[name], list | dict | set):
                names[name] = copy.copy(names[name])
            elif type(names[name]) is Tensor:
                names[name] = names[name].clone()
        with ExitStack() as stack:
            for generator in self._generators:
                stack.callback(generator.set_state, generator.get_state())
            try:
                exec(self._code, names)
            except _Returned as returned:
                return returned.args[0]
        return None

    def _reach(self, loss: Any) -> None:
        """End all with the loss of a backward, unless the value of the call is known not to lead to it."""
        if (nodes := nodes_behind(tensors_in(loss))) and not (self._nodes and self._nodes.isdisjoint(nodes)):
            raise _Reached(loss)

    def target(self, place: Expression) -> source.Target | str:
        """Return the statements as what runs a line, if it is one of theirs; else as `find_target` does."""
        node, file = source.node_of(self._file, self._caller.code), self._file
        # A function between the statements has a name.
        is_of_statements = place.code is None or place.code.co_name[0] == "<"
        if is_of_statements and node and place.filename == file.name and place.line in self._lines:
            function = FunctionType(self._code, self._names)
            return source.Target((function,), file, node, self.exchanged)
        return source.find_target(place) if self.inner is None else self.inner.target(place)

    @contextmanager
    def exchanged(
        self, file: source.SourceFile, looks: Sequence[source.Span], probe: source.Probe
    ) -> Iterator[None]:
        """Run the same statements of the edited file in the block, as `source.exchanged` does for a function.

        Raises ValueError where the edit moved the statements.
        """
        # A line that was added stands before the backward.
        added = file.text.count("\n") - self._file.text.count("\n")
        part = part_of(self._caller._replace(line=self._caller.line + added), file, self._kept)
        if part is None:
            raise ValueError("the edit moved the statements")
        before, self._code = self._code, source.compiled_with(ast.Module(part.body, []), file, looks, probe)
        try:
            yield
        finally:
            self._code = before
