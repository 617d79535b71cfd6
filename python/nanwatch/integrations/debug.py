"""DebugUnderflowOverflow and detect_overflow with the text that transformers' pair prints, also for its Trainer.

`patch_transformers` lets nanwatch serve `--debug underflow_overflow`. Trainer looks up the name DebugUnderflowOverflow
in its own module each time it begins to train. Only that name is replaced: `transformers.debug_utils` keeps its class.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Collection, Container, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..numerics._reference import without_repeats
from ..numerics.ranges import abs_range, tensor_health
from ..recording.observe import own_tensors, read
from ..report import text
from ..report.record import Role, Row, to_record
from ..report.report import BatchLimitError
from ..session.options import MAX_BATCH, whole
from ..util.imports import WhenImported, when_imported
from ..util.visible import module_name, visible, warn_user

SWITCH = "NANWATCH_TRANSFORMERS"
_TRAINER = "transformers.trainer"
_NAME = "DebugUnderflowOverflow"

_original: Any = None  # Trainer's own class while ours replaces it
_waiting: WhenImported | None = None


class OverflowDetectedError(ValueError):
    """A nan or an inf in a module call; the frames that led to it are on stdout."""


class _SavedFrame(NamedTuple):
    """A frame before it is printed. Nothing is formatted earlier."""

    header: list[str]
    name: str
    class_name: str
    rows: list[Row]

    def __str__(self) -> str:
        lines = [*self.header, text.frame_line(self.name, self.class_name)]
        return "\n".join(lines + [text.record_line(to_record(row)) for row in self.rows])


class DebugUnderflowOverflow:
    """Prints the frames that led to the first nan or inf, then raises; or prints whole batches.

    A drop-in for transformers.debug_utils.DebugUnderflowOverflow: same arguments, same stdout. docs/compatibility.md
    lists the intended differences. `nanwatch.watch` sees more of a call and returns its report as an object.

    Args:
        model: the module to watch, from now until `stop()`.
        max_frames_to_save: how many frames to keep until something is found; None keeps all.
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

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int | None = 21,
        trace_batch_nums: Container[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"DebugUnderflowOverflow needs a torch.nn.Module, got {type(model).__name__};"
                " pass the model itself"
            )
        if max_frames_to_save is not None:
            max_frames_to_save = whole("max_frames_to_save", max_frames_to_save, 0, sys.maxsize)
        if abort_after_batch_num is not None:
            abort_after_batch_num = whole("abort_after_batch_num", abort_after_batch_num, 0, MAX_BATCH)
        self.model = model
        self.trace_batch_nums: Container[int] = () if trace_batch_nums is None else _batches(trace_batch_nums)
        self.abort_after_batch_num = abort_after_batch_num
        self.batch_number = 0
        self.total_calls = 0
        self.detected_overflow = False
        self.prefix = text.PREFIX
        self.module_names = {module: name for name, module in model.named_modules()}
        self._header: list[str] = []
        self._saved: deque[_SavedFrame] = deque(maxlen=max_frames_to_save)
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self.forward_hook) for module in self.module_names
        ]

    @property
    def frames(self) -> list[str]:
        """The saved frames as text, oldest first."""
        return list(map(str, self._saved))

    @property
    def frame(self) -> list[str]:
        """Lines that wait to be printed above the next frame."""
        return list(self._header)

    def stop(self) -> None:
        """Take the hooks off the model; a second time does nothing."""
        while self._handles:
            self._handles.pop().remove()

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
        """Look at one call; PyTorch calls this when a module's forward returns."""
        batch = self.batch_number
        is_traced = batch in self.trace_batch_nums
        if self.total_calls == 0:
            self._header += text.batch_lines(batch)
        self.total_calls += 1
        # The root's own forward ends last, and with it the batch.
        is_root = module is self.model
        if is_root:
            self.batch_number += 1

        rows: list[Row] = []
        overflowed = False
        for value, label, role in _values(module, args, output):
            rows.append(read(value, label, role))
            if rows[-1].isfinite is False and _print_kinds(value, visible(label)):
                overflowed = True
        frame = _SavedFrame(self._header, self.module_names[module], type(module).__name__, rows)
        self._header = []
        if is_traced:
            self.reset_saved_frames()
            print(frame)
        else:
            self._saved.append(frame)
        if is_root:
            self._header += text.batch_lines(self.batch_number)

        if overflowed:
            self.detected_overflow = True
            if not is_traced:
                self._dump(batch)
                raise OverflowDetectedError(
                    f"nan or inf in batch {batch}, in a call of {module_name(frame.name)}"
                    f" ({visible(frame.class_name)}); the frames that led to it were printed above"
                )
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise BatchLimitError(self.batch_number - 1, "abort_after_batch_num")

    def _dump(self, batch: int) -> None:
        print(f"\nDetected inf/nan during batch_number={batch}")
        print(f"Last {len(self._saved)} forward frames:")
        print(text.COLUMNS)
        print("\n".join(self.frames))
        print("\n\n")
        self._saved.clear()


def _batches(value: Container[int]) -> Container[int]:
    """Return `value` if it can hold batch numbers, and holds nothing else as far as that can be seen."""
    if isinstance(value, str | bytes) or not isinstance(value, Container):
        raise TypeError(
            f"trace_batch_nums should be a container of batch numbers such as [0, 3], got {value!r}"
        )
    # A range holds integers and may be too long to iterate. A plain container cannot be iterated.
    if isinstance(value, Collection) and not isinstance(value, range):
        for batch in value:
            whole("each of trace_batch_nums", batch, 0, MAX_BATCH)
    return value


def detect_overflow(var: Tensor, ctx: str) -> bool:
    """Return whether `var` holds a nan or an inf; prints `{ctx} has nans` and `{ctx} has infs` when it does.

    Raises TypeError for an object that is no tensor, and for a tensor that cannot be read.

    Examples:
        >>> import nanwatch, torch
        >>> nanwatch.detect_overflow(torch.tensor([1.0, torch.nan]), "loss")
        loss has nans
        True
    """
    return not abs_range(var).isfinite and _print_kinds(var, ctx)


def _print_kinds(x: Tensor, ctx: str) -> bool:
    """Print the kinds of non-finite value that `x` holds. Return whether there is one."""
    if x.is_complex():
        # Read the parts, not the modulus: (inf, nan) has both kinds and one modulus.
        x, _ = without_repeats(x)
        has_nan, has_inf = bool(torch.isnan(x).any()), bool(torch.isinf(x).any())
    else:
        health = tensor_health(x)
        has_nan, has_inf = health.num_nan > 0, health.num_posinf + health.num_neginf > 0
    if has_nan:
        print(f"{ctx} has nans")
    if has_inf:
        print(f"{ctx} has infs")
    return has_nan or has_inf


def _values(module: nn.Module, args: Any, output: Any) -> Iterator[tuple[Any, str, Role]]:
    """Yield the values of a frame: weights, positional inputs, and outputs of up to two levels of tuples."""
    for name, weight in own_tensors(module._parameters):
        yield weight, name, "weight"
    for position, value in enumerate(args):
        yield value, f"input[{position}]", "input"
    if not isinstance(output, tuple):
        yield output, "output", "output"
        return
    for position, value in enumerate(output):
        if isinstance(value, tuple):
            for inner, element in enumerate(value):
                yield element, f"output[{position}][{inner}]", "output"
        else:
            yield value, f"output[{position}]", "output"


class TrainerDebug(DebugUnderflowOverflow):
    """DebugUnderflowOverflow that removes the one before it from a model.

    Trainer makes one in each `train()` and keeps none, so the hooks of the last would stay on the model.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[TrainerDebug]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        before = self._of.get(model)
        if before is not None and (last := before()) is not None:
            last.stop()
        self._of[model] = weakref.ref(self)


def patch_transformers() -> None:
    """Let nanwatch serve `TrainingArguments(debug="underflow_overflow")`, until `unpatch_transformers()`.

    Prints the same text on stdout as transformers' class. Takes effect when `transformers.trainer` is imported, if it
    is not yet, and imports nothing itself. Does nothing the second time.

    Examples:
        >>> import nanwatch
        >>> nanwatch.patch_transformers()  # TrainingArguments(debug="underflow_overflow") now means nanwatch
        >>> nanwatch.unpatch_transformers()
    """
    global _waiting
    if _original is None and _waiting is None:
        _waiting = when_imported(_TRAINER, _swap)


def unpatch_transformers() -> None:
    """Give Trainer its own class back. Hooks on a model stay there. Does nothing the second time.

    Examples:
        >>> import nanwatch
        >>> nanwatch.patch_transformers()
        >>> nanwatch.unpatch_transformers()  # a second time does nothing
    """
    global _original, _waiting
    if _waiting is not None:
        _waiting.cancel()
        _waiting = None
    trainer = sys.modules.get(_TRAINER)
    # A third class that somebody has put there since stays.
    if trainer is not None and getattr(trainer, _NAME, None) is TrainerDebug:
        setattr(trainer, _NAME, _original)
    _original = None


def follow_environment() -> None:
    """Patch if NANWATCH_TRANSFORMERS=1."""
    word = os.environ.get(SWITCH, "")
    if word == "1":
        patch_transformers()
    elif word not in ("", "0"):
        # An import is no place to fail.
        warn_user(f"{SWITCH}={word!r} is not understood and does nothing; set it to 1 or 0")


def _swap() -> None:
    global _original, _waiting
    _waiting = None
    trainer = sys.modules[_TRAINER]
    theirs = getattr(trainer, _NAME, None)
    if theirs is None:
        warn_user(
            f"nanwatch found no {_NAME} in {_TRAINER}, so --debug underflow_overflow stays as it is;"
            " use nanwatch.integrations.transformers.NanWatchCallback"
        )
        return
    _original = theirs
    setattr(trainer, _NAME, TrainerDebug)
