"""Recorder settings, the callbacks that a recorder invokes and what they hand over, and the recorder interface.

Two recorders do the same work; see recorder.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .._C import CallRecorder
    from ..records.record import Frame

PeakName: TypeAlias = tuple[str, str, str]  # module, label, dtype
ActAt: TypeAlias = Literal["auto", "module", "batch"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a recorder: which tensors it reads and how many frames it keeps; see `watch`.

    CallRecorder reads them by their names (`NANWATCH_SETTINGS` in csrc/recorder/call_observer.h).
    """

    max_frames: int = 21
    every: int = 1
    traced: tuple[int, ...] = ()
    weights: bool = True
    buffers: bool = True
    inputs: bool = True
    outputs: bool = True
    verify_hits: bool = False  # read again on every cache hit and count the differences
    gradients: bool = False
    output_gradients: bool = False  # those of the outputs of outermost calls, kept from a non-finite one on
    counts: bool = False  # every record is Python's, with the counts of its tensor
    fingerprints: bool = False  # every record has the hash of its tensor's bits
    sketches: int = 0  # in every batch of this many, Python projects the outputs; 0: in none
    black_box: bool = False  # write calls into the file of the process, if it has one
    act_at: ActAt = "auto"


class Event(IntEnum):  # not IntFlag, whose `&` takes 1 µs
    """Events that a recorder reports only while somebody subscribes; numbered as in csrc/recorder/call_recorder.h."""

    BATCH_START = 1
    BATCH_END = 2
    FRAME = 4
    BACKWARD_START = 8


Part: TypeAlias = Literal["output", "input", "weight"]


class BackwardCall(NamedTuple):
    """A call that got gradients: its frame, the position of the call that made it, and its number.

    `caller` is None where the call that made it got no gradients. Calls are numbered in the order in which they end in
    the forward, so children come before their parents.
    """

    frame: Frame
    caller: int | None
    number: int


class Arrival(NamedTuple):
    """One record of a backward: the positions of its call and in its frame, and the part that it is the gradient of.

    `time` orders the records. All of one gradient have the same, as a module's output is the next one's input.
    """

    call: int
    record: int
    part: Part
    time: int


class StepWeight(NamedTuple):
    """Weight of a model before a step: its full name, itself, samples of it and of its gradient.

    `group_size` is the number of ranks over which torch.distributed.all_reduce reduced the gradient, as far as seen.
    """

    name: str
    tensor: Tensor
    values: Tensor
    gradient: Tensor | None
    group_size: int | None = None


class Start(NamedTuple):
    """Start of a batch: its outermost call, and the state on which that call depends.

    `generator`: the state of the CPU's random numbers. `cuda`: of each CUDA device's, from `watch_generators`.
    `autocast`: by device. `versions`: of the tensors among the arguments. `elapsed`: seconds since. `extra`: what
    `on_batch_start` has answered.
    """

    batch: int
    module: nn.Module | None  # None once it is gone, or not kept any longer
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    generator: Tensor
    cuda: tuple[Tensor, ...]
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    inference: bool
    grad: bool
    versions: list[tuple[Tensor, int]]
    elapsed: float
    extra: Any

    @classmethod
    def of(cls, batch: int, module: nn.Module, args: tuple[Any, ...], kwargs: Any, extra: object) -> Start:
        """Return the start of a batch that begins now, as csrc/recorder/batch_start.h makes it."""
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")
        )
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        # CUDA's generators refuse while a graph is captured.
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        cuda = tuple(x.get_state() for x in (() if is_captured else torch.cuda.default_generators))
        state = (torch.get_rng_state(), cuda, autocast, *modes, versions_of(args, kwargs))
        return cls(batch, module, args, kwargs, *state, 0.0, extra)


def versions_of(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> list[tuple[Tensor, int]]:
    """Return the tensors among the arguments, and in their lists, tuples and dicts, with their versions."""
    values = [*args, *(kwargs or {}).values()]
    for value in values.copy():  # one level deep
        values += value if isinstance(value, tuple | list) else ()
        values += value.values() if isinstance(value, dict) else ()
    with torch._C.DisableTorchFunction():  # no function mode of the user sees the reads
        # By the class alone: an object may say by its `__class__` that it is a tensor.
        return [(x, x._version) for x in values if issubclass(type(x), Tensor) and not x.is_inference()]


class RecorderEvents(Protocol):
    """Callbacks of a recorder, all of one object. An exception from one leaves the module call.

    Some are called only while there is a subscription to their event; see `Recorder.subscribe`.
    """

    def on_batch_start(
        self, batch: int, traced: bool, module: nn.Module | None, args: tuple[Any, ...], kwargs: Any
    ) -> object:
        """Handle the start of a batch, the call `module(*args, **kwargs)`.

        `kwargs` may be None. In compiled code, all three are unknown. Called for traced batches, and for all with a
        subscription to BATCH_START or while a name is true that `watch_name` was given. A recorder that `keeps_starts`
        takes the answer as the start's `extra`, also for later batches. It asks anew where a buffer has changed that
        `watch_buffers` was given, and in every batch whose number is a power of two.
        """

    def on_frame(self, frame: Frame) -> None:
        """Handle a recorded call. Called for traced batches, and for all with a subscription to FRAME."""

    def on_nonfinite(
        self, frame: Frame, caller: str | None, args: tuple[Any, ...], kwargs: Any, is_over: bool
    ) -> None:
        """Handle a call that held a non-finite value.

        `caller` is the watched module that made the call. `args` and `kwargs` (or None) are the outermost call's. In
        compiled code `kwargs` are its tensors, by their places: `input[0][1]` is named `0][1`.
        `is_over`: that call has ended, as its records came from a device at its end; `on_batch_end` follows.
        """

    def on_batch_end(self, batch: int, completed: bool) -> None:
        """Handle an outermost call that raised; or, with a subscription to BATCH_END, returned (`completed`).

        A call that returned is reported also from the batch `gathers_from` on.
        The exception of the call is then `sys.exc_info()[1]`. An exception from here replaces it only if it was raised
        from that one. Calls of watched modules made from here, or from `on_nonfinite`, are not recorded.
        """

    def on_backward_start(self) -> None:
        """Handle the first gradient of a backward, before any is accumulated. Needs a subscription."""

    def on_backward_end(self, calls: list[BackwardCall], arrivals: list[Arrival]) -> None:
        """Handle the end of a backward with a non-finite gradient; its frames are not yet among `frames()`."""


# PythonRecorder (recorder.py), which documents the methods, has all of them too.
Recorder: TypeAlias = "CallRecorder"
