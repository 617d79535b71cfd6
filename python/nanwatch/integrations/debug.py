"""DebugUnderflowOverflow and detect_overflow, with the text that transformers' pair prints.

Trainer looks up the name of the class in its own module each time it begins to train. `patch_transformers` replaces
only that name: `transformers.debug_utils` keeps its class.
"""

from __future__ import annotations

import copyreg
import sys
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling

from ..instrumentation.global_hooks import Changes
from ..instrumentation.wrapped_names import is_recorded, module_names, original_module
from ..numerics.formats import TensorHealth
from ..numerics.ranges import abs_range, tensor_health
from ..recording.observe import observe, own_tensors
from ..records.record import Frame, Note, Record, Role
from ..report import text
from ..report.report import BatchLimitError, NonFiniteError
from ..session.api import DEFAULTS
from ..session.kinds import MAX_BATCH, whole
from ..session.watch import EventDispatch, Watch
from ..util.messages import visible, warn_user, with_utf8

_MOST_FRAMES = 100_000  # the recorder reserves 0.2 kB for each
_TRAINER, _NAME = "transformers.trainer", "DebugUnderflowOverflow"
_break_graph = _disable_dynamo(lambda: None)


class _PrintedCall(NamedTuple):
    """A call of a module before it is printed. Nothing is formatted earlier.

    `recorded` is the name of its frame, None for a call that was read at once into `rows`. `number` is the
    number of frames that the recorder had kept before. `values` are label, role and type of each value to print: the
    rows of the recorder do not say what was a tuple, what a list, and what was empty.
    """

    header: list[str]
    name: str
    class_name: str
    recorded: str | None
    number: int
    values: list[tuple[str, Role, type]]
    rows: list[Record]

    def shown(self, frame: Frame) -> list[Record]:
        """Return the rows that the original prints, of all in the frame."""
        rows = [row for row in frame.records if row.role == "weight"]
        read = {(row.role, row.label): row for row in reversed(frame.records)}
        for label, role, kind in self.values:
            note = Note("absent" if kind is type(None) else "not_a_tensor")
            row = read.get((role, label)) if issubclass(kind, Tensor) else None
            rows.append(row or Record(label, role, None, "", None, None, None, None, note))
        return rows

    def text(self, rows: list[Record]) -> str:
        plain = [row._replace(note=None) if row.is_excused else row for row in rows]
        lines = [*self.header, text.frame_line(self.name, self.class_name)]
        return "\n".join(lines + [text.record_line(row) for row in plain])


class _DebugEvents(EventDispatch):
    """Dispatch that fails only where DebugUnderflowOverflow looks, once the frames are printed."""

    def __init__(self, debug: DebugUnderflowOverflow) -> None:
        # Weak: the wrappers in the slot hold this, and must not hold the model.
        self._debug = ref(debug)

    def on_nonfinite(
        self, frame: Frame, caller: str | None, args: tuple[Any, ...], kwargs: Any, is_over: bool
    ) -> None:
        """Print the frames and raise, unless the original would see nothing in this call."""
        debug = self._debug()
        if debug is not None and debug._detects(frame):
            super().on_nonfinite(frame, caller, args, kwargs, is_over)
            # The forward has caught the first error of the batch.
            raise NonFiniteError(debug._watch.report())

    def on_batch_end(self, batch: int, completed: bool) -> None:
        super().on_batch_end(batch, completed)
        debug = self._debug()
        limit = None if debug is None else debug.abort_after_batch_num
        if completed and debug is not None and limit is not None and debug.batch_number > limit:
            raise BatchLimitError(debug.batch_number - 1)


class DebugWatch(Watch):
    """Watch of a class of its own, by which `nanwatch run` knows that it acts on fewer values."""


class DebugUnderflowOverflow:
    """Prints the frames that led to the first nan or inf, then raises; or prints whole batches.

    A drop-in for transformers.debug_utils.DebugUnderflowOverflow: same arguments, same stdout. docs/compatibility.md
    lists the intended differences. The error is a NonFiniteError with the report that `nanwatch.watch` makes.

    Args:
        model: the module to watch, from now until `stop()`.
        max_frames_to_save: how many frames to keep until something is found; None keeps 100,000.
        trace_batch_nums: numbers of batches, from 0, to print whole and without detection.
        abort_after_batch_num: raise a ValueError when the batch of this number is done.

    Raises TypeError or ValueError, naming the value, for any other argument.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.ReLU()
        >>> debug = nanwatch.DebugUnderflowOverflow(model, max_frames_to_save=5)
        >>> output = model(torch.tensor([-1.0, 2.0]))
        >>> debug.trace_frames()  # debug.dump_saved_frames() adds a heading
        <BLANKLINE>
        <BLANKLINE>
                          *** Starting batch number=0 ***
        abs min  abs max  metadata
                           ReLU
        1.00e+00 2.00e+00 input[0]
        0.00e+00 2.00e+00 output
        >>> debug.reset_saved_frames()
        >>> debug.stop()
    """

    # Copies and pickles of the model take its hooks along. They are not watched.
    _recorder: Any = SimpleNamespace(paused=True)

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int | None = 21,
        trace_batch_nums: Container[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            needed = "DebugUnderflowOverflow needs a torch.nn.Module"
            raise TypeError(f"{needed}, got {type(model).__name__}; pass the model itself")
        if max_frames_to_save is not None:
            max_frames_to_save = whole("max_frames_to_save", max_frames_to_save, 0, sys.maxsize)
        if abort_after_batch_num is not None:
            abort_after_batch_num = whole("abort_after_batch_num", abort_after_batch_num, 0, MAX_BATCH)
        self.model = model
        batches: Any = () if trace_batch_nums is None else trace_batch_nums
        if isinstance(batches, str | bytes) or not isinstance(batches, Container):
            raise TypeError(f"trace_batch_nums should be a container of batches like [0, 3], got {batches!r}")
        self.trace_batch_nums: Container[int] = batches
        self.abort_after_batch_num = abort_after_batch_num
        self.batch_number = 0
        self.total_calls = 0
        self.detected_overflow = False
        self.prefix = text.PREFIX
        self.module_names = {module: name for name, module in model.named_modules()}
        self._header: list[str] = []
        self._saved: deque[_PrintedCall] = deque(maxlen=max_frames_to_save)
        self._latest: _PrintedCall | None = None
        self._batch = 0  # of the latest call
        watched = original_module(model)
        room = max(1, _MOST_FRAMES if max_frames_to_save is None else min(max_frames_to_save, _MOST_FRAMES))
        # "module": the original prints at the call that holds the value.
        parts = "weights", "inputs", "outputs"
        options = replace(DEFAULTS, read=parts, max_frames=room, act_at="module", forecast=False)
        self._watch = DebugWatch(watched, options, events=_DebugEvents(self))
        self._watch._batch_ends.active = abort_after_batch_num is not None
        self._recorder = self._watch._recorder
        names = module_names(watched).items()
        self._recorded = {module: with_utf8(name) for module, name in names if is_recorded(module)}
        self._handles = [module.register_forward_hook(self.forward_hook) for module in self.module_names]

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (type(self),)  # type: ignore[attr-defined]

    @property
    def frames(self) -> list[str]:
        """The saved frames as text, oldest first."""
        # A call whose frame is missing was left by an exception from a later hook.
        texts: list[str] = []
        number = self._saved[0].number if self._saved else 0
        kept, frames = self._recorder.frames_since(number)
        first = kept - len(frames)
        for call in list(self._saved):
            later = frames[max(0, call.number - first) :]
            frame = next((frame for frame in later if frame.name == call.recorded), None)
            rows = call.rows or (frame and call.shown(frame))
            texts += [] if rows is None else [call.text(rows)]
        return texts

    @property
    def frame(self) -> list[str]:
        """Lines that wait to be printed above the next frame."""
        return list(self._header)

    def stop(self) -> None:
        """Take the hooks off the model; a second time does nothing."""
        while self._handles:
            self._handles.pop().remove()
        self._watch.stop()

    def reset_saved_frames(self) -> None:
        """Forget the saved frames."""
        self._saved.clear()

    def trace_frames(self) -> None:
        """Print the saved frames alone, then forget them."""
        print("\n".join(self.frames))
        self._saved.clear()

    def dump_saved_frames(self) -> None:
        """Print the saved frames with the heading of a detection, then forget them."""
        self._dump(self.batch_number)

    def forward_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the structure of a call, which the recorder reads next; PyTorch calls this when a forward returns."""
        if is_compiling():  # Dynamo would put this off to the end of its graph, and lose it where one raises
            _break_graph()
        if self._recorder.paused:  # by stop(), or for a re-run
            return
        self._batch = batch = self.batch_number
        if self.total_calls == 0:
            self._header += text.batch_lines(batch)
        self.total_calls += 1
        is_traced = batch in self.trace_batch_nums
        recorded = None if is_traced else self._recorded.get(module)
        rows: list[Record] = []
        if recorded is None:
            rows = [observe(x, name, "weight") for name, x in own_tensors(module._parameters)]
            rows += [observe(x, label, role) for x, label, role in _values(args, output)]
        values = [(label, role, type(x)) for x, label, role in _values(args, output)]
        number = self._recorder.frames_kept
        names = self.module_names[module], type(module).__name__
        self._latest = call = _PrintedCall(self._header, *names, recorded, number, values, rows)
        self._header = []
        if is_traced:
            self.reset_saved_frames()
            self.detected_overflow |= _print_kinds(rows)
            print(call.text(rows))
        else:
            self._saved.append(call)
        # The root's own forward ends last, and with it the batch.
        if module is self.model:
            self.batch_number += 1
            self._header += text.batch_lines(self.batch_number)

    def _detects(self, frame: Frame) -> bool:
        """Print the saved frames if the original sees a non-finite value in this one, and return whether it does."""
        calls = (printed for printed in (self._latest, *reversed(self._saved)) if printed is not None)
        call = next((printed for printed in calls if printed.recorded == frame.name), None)
        if call is None or not _print_kinds(call.shown(frame)):
            return False
        self.detected_overflow = True
        self._dump(self._batch)
        return True

    def _dump(self, batch: int) -> None:
        frames = self.frames
        print(f"\nDetected inf/nan during batch_number={batch}\nLast {len(frames)} forward frames:")
        print(text.COLUMNS, "\n".join(frames), "\n\n", sep="\n")
        self._saved.clear()
        self._latest = None


def detect_overflow(var: Tensor, ctx: str) -> bool:
    """Return whether `var` holds a nan or an inf; prints `{ctx} has nans` and `{ctx} has infs` when it does.

    Raises TypeError for an object that is no tensor, and for a tensor that cannot be read.

    Examples:
        >>> import nanwatch, torch
        >>> nanwatch.detect_overflow(torch.tensor([1.0, torch.nan]), "loss")
        loss has nans
        True
    """
    if abs_range(var).isfinite:
        return False
    # Complex parts are read one by one, not the modulus: (inf, nan) has both kinds and one modulus.
    parts = torch.view_as_real(var.resolve_conj()) if var.is_complex() else var
    return _print_kind(ctx, tensor_health(parts))


def _print_kinds(rows: list[Record]) -> bool:
    """Print the kinds of non-finite value that these rows hold. Return whether there is one."""
    nonfinite = [(row.label, row.health) for row in rows if row.isfinite is False and row.health is not None]
    for label, health in nonfinite:
        _print_kind(visible(label), health)
    return bool(nonfinite)


def _print_kind(label: str, health: TensorHealth) -> bool:
    kinds = {"nans": health.num_nan, "infs": health.num_posinf + health.num_neginf}
    for kind in filter(kinds.get, kinds):
        print(f"{label} has {kind}")
    return any(kinds.values())


def _values(args: Any, output: Any) -> Iterator[tuple[Any, str, Role]]:
    """Yield positional inputs, and outputs of up to two levels of tuples."""
    yield from ((value, f"input[{position}]", "input") for position, value in enumerate(args))
    yield from _outputs(output, "output", 2)


def _outputs(value: Any, label: str, levels: int) -> Iterator[tuple[Any, str, Role]]:
    if not levels or not isinstance(value, tuple):
        yield value, label, "output"
    else:
        for position, item in enumerate(value):
            yield from _outputs(item, f"{label}[{position}]", levels - 1)


class TrainerDebug(DebugUnderflowOverflow):
    """DebugUnderflowOverflow that removes the one before it from a model.

    Trainer makes one in each `train()` and keeps none, so the hooks of the last would stay on the model.
    """

    _of: ClassVar[WeakKeyDictionary[nn.Module, ref[TrainerDebug]]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        if (last := self._of.get(model, lambda: None)()) is not None:
            last.stop()
        self._of[model] = ref(self)


def patch_transformers() -> None:
    """Let nanwatch serve `TrainingArguments(debug="underflow_overflow")`, until `unpatch_transformers()`.

    Prints the same text on stdout as transformers' class. Takes effect when `transformers.trainer` is imported, if it
    is not yet, and imports nothing itself. Does nothing the second time.

    Examples:
        >>> from nanwatch.integrations.debug import patch_transformers, unpatch_transformers
        >>> patch_transformers()  # TrainingArguments(debug="underflow_overflow") now means nanwatch
        >>> unpatch_transformers()
    """
    _trainer.make()


def unpatch_transformers() -> None:
    """Give Trainer its own class back. Hooks on a model stay there. Does nothing the second time."""
    _trainer.undo()


def _swap() -> None:
    trainer = sys.modules[_TRAINER]
    if hasattr(trainer, _NAME):
        _trainer.replace(trainer, _NAME, TrainerDebug)
    else:
        why = f"nanwatch found no {_NAME} in {_TRAINER}, so --debug underflow_overflow stays as it is"
        warn_user(f"{why}; use nanwatch.integrations.transformers.NanWatchCallback")


_trainer = Changes(_TRAINER, _swap)
