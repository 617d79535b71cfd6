"""DebugUnderflowOverflow and detect_overflow with the text that transformers' pair prints."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..numerics._reference import without_repeats
from ..numerics.ranges import abs_range, tensor_health
from ..recording.observe import own_tensors, read
from ..report import text
from ..report.errors import BatchLimitError
from ..report.record import Role, Row, to_record
from ..session.options import MAX_BATCH, whole
from ..util.visible import visible


class OverflowDetectedError(ValueError):
    """A nan or an inf was seen in a module call; what led to it is on stdout."""


class _SavedFrame(NamedTuple):
    """A frame as it waits to be printed: nothing is formatted before that."""

    header: list[str]
    name: str
    class_name: str
    rows: list[Row]

    def __str__(self) -> str:
        lines = [*self.header, text.frame_line(self.name, self.class_name)]
        return "\n".join(lines + [text.record_line(to_record(row)) for row in self.rows])


class DebugUnderflowOverflow:
    """Prints the frames that led to the first nan or inf, then raises; or prints whole batches.

    A drop-in for transformers.debug_utils.DebugUnderflowOverflow: same arguments, same stdout; where the two
    differ on purpose is in docs/compatibility.md. `nanwatch.watch` sees more of a call and gives its report
    as an object.

    model: the module to watch, from now until `stop()`.
    max_frames_to_save: how many frames to keep for the moment something is found; None keeps all.
    trace_batch_nums: numbers of batches, from 0, to print whole and without detection.
    abort_after_batch_num: raise a ValueError when the batch of this number is done.

    Raises TypeError or ValueError, naming the value, for any other argument.
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
                    f"nan or inf in batch {batch}, in a call of {text.module_name(frame.name)}"
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
    """`value`, if it can hold batch numbers, and holds nothing else as far as that can be seen."""
    if isinstance(value, str | bytes) or not isinstance(value, Container):
        raise TypeError(
            f"trace_batch_nums should be a container of batch numbers such as [0, 3], got {value!r}"
        )
    # A range holds integers and may be too long to look through; what is only a container cannot be looked through.
    if isinstance(value, Collection) and not isinstance(value, range):
        for batch in value:
            whole("each of trace_batch_nums", batch, 0, MAX_BATCH)
    return value


def detect_overflow(var: Tensor, ctx: str) -> bool:
    """Return whether `var` holds a nan or an inf; prints `{ctx} has nans` and `{ctx} has infs` when it does.

    Raises TypeError for what is no tensor and for a tensor that cannot be read.
    """
    return not abs_range(var).isfinite and _print_kinds(var, ctx)


def _print_kinds(x: Tensor, ctx: str) -> bool:
    """Which kinds of non-finite value `x` holds, printed the moment it is known."""
    if x.is_complex():
        # Of the parts, not of the modulus: (inf, nan) has both kinds and one modulus.
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
    """What a frame is made of: weights, positional inputs, and outputs of up to two levels of tuples."""
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
