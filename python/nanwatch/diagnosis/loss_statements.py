"""The statements that computed a loss outside all modules, from the stack of its `backward()`, to be run again.

The names of a frame keep their values until the backward. So of its statements only those run again that made a value
from the model's outputs or changed one, and no more than its own: no step of an optimizer, nothing that hands out data.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..util.program_code import SKIPPED_FILES, frame_values
from .loss_slice import RESULT, Caller, Cut, Refused, body_of, call_under_way, cut_of
from .operation import tensors_in
from .patching.code_swap import Probe, compiled_with, find_target
from .patching.source import SourceFile, Span, Target, called_name, path_to

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
# Lightning has twenty between the loss and the engine.
_MOST_FRAMES = 32


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
        reason = "the source of the loss was not found"
        for caller, above in zip(self.callers, [*self.callers[1:], None], strict=True):
            file = SourceFile.load(caller.code.co_filename)
            if file is None:
                continue
            caller = caller._replace(handed=_handed(caller, above))
            try:
                if (cut := cut_of(caller, file, self.is_behind)) is not None:
                    return LossStatements(model, caller, file, self.is_behind, cut)
            except Refused as error:
                reason = str(error)
                break
        raise Refused(reason)


def loss_under_way() -> Tensor | None:
    """Return the loss whose `backward()` is under way, None where what it began at is no single number."""
    frame = _engine_frame()
    names: dict[str, Any] = {} if frame is None else frame.f_locals
    roots: Sequence[Tensor] = names["t_outputs"] if names.get("kwargs", {}).get("accumulate_grad") else ()
    return roots[0] if len(roots) == 1 and roots[0].numel() == 1 else None


def _engine_frame() -> FrameType | None:
    """Return the frame that runs this thread's backward; in a thread of the engine, the only one there is."""
    frame = _engine_above(sys._getframe(1))
    if frame is not None:
        return frame
    frames = [one for top in sys._current_frames().values() if (one := _engine_above(top)) is not None]
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


def _handed(caller: Caller, above: Caller | None) -> dict[str, Any]:
    """Return the values of the parameters with which `above` called, of those that are names there."""
    file = None if above is None else SourceFile.load(above.code.co_filename)
    top = None if above is None or file is None else body_of(above, file)
    path = [] if above is None or top is None else path_to(top, above.line)
    call = None if above is None or not path else call_under_way(path[-1][1], above, caller.code.co_name)
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


class LossStatements(nn.Module):
    """The statements as a module, whose call runs them and returns the loss. `inputs` are what they read, by name."""

    def __init__(
        self, model: nn.Module, caller: Caller, file: SourceFile, is_behind: Callable[[Any], bool], cut: Cut
    ) -> None:
        super().__init__()
        self.model = model  # so that a re-run of the statements holds its state, and no watch sees its calls
        self.filename = file.name
        self.lines = cut.body[0].lineno, cut.last_line
        self.inputs = {name: cut.reads[name] for name in sorted(cut.reads) if tensors_in(cut.reads[name])}
        self._cut, self._caller, self._file, self._is_behind = cut, caller, file, is_behind
        self._names = {**caller.globals, **caller.names, **cut.reads}
        self._probe = Probe()
        self._code = compiled_with(ast.Module(cut.body, []), file, (), self._probe)

    def forward(self, **inputs: Any) -> Any:
        """Run the statements with these values of the names they read."""
        self._probe.was_run = True
        names = {**self._names, **inputs}
        exec(self._code, names)
        return names[RESULT]

    def target(
        self, filename: str, line: int, positions: tuple[int | None, ...] | None = None
    ) -> Target | str:
        """Return the statements as what runs this line, if it is one of theirs; else as `find_target` does."""
        is_own = any(one.lineno <= line <= (one.end_lineno or one.lineno) for one in self._cut.body)
        node = body_of(self._caller, self._file)
        if filename != self.filename or not is_own or node is None:
            return find_target(filename, line, positions)
        return Target((FunctionType(self._code, self._names),), self._file, node, self.exchanged)

    @contextmanager
    def exchanged(self, file: SourceFile, looks: Sequence[Span], probe: Probe) -> Iterator[None]:
        """Run the same statements of the edited file in the block, as `code_swap.exchanged` does for a function.

        Raises ValueError where the edit needs statements that did not run. Some may no longer be needed.
        """
        cut = cut_of(self._caller, file, self._is_behind)
        if cut is None or len(cut.body) > len(self._cut.body):
            raise ValueError("the edit moved the statements")
        before = self._code, self._probe
        self._code, self._probe = compiled_with(ast.Module(cut.body, []), file, looks, probe), probe
        try:
            yield
        finally:
            self._code, self._probe = before
