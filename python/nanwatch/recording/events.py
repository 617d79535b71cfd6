"""Recorder settings, the callbacks that a recorder invokes, and the recorder interface.

Two recorders do the same work; see recorder.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import weakref

    import torch
    from torch import Tensor, nn

    from ..records.note import Note
    from ..records.record import Frame, Record
    from .masks import Excuses

PeakName: TypeAlias = tuple[str, str, str]  # module, label, dtype
Check: TypeAlias = Literal["auto", "module", "batch"]


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
    counts: bool = False  # every row is Python's, with the counts of its tensor
    fingerprints: bool = False  # every row has the hash of its tensor's bits
    sketches: int = 0  # in every batch of this many, Python projects the outputs; 0: in none
    statistics: int = (
        0  # in every batch of this many, every row is Python's, with the statistics of its tensor
    )
    black_box: bool = False  # write calls into the file of the process, if it has one
    check: Check = "auto"


class Event(IntEnum):  # not IntFlag, whose `&` takes 1 µs
    """Events that a recorder reports only while somebody subscribes; numbered as in csrc/recorder/subscriptions.h."""

    BATCH_START = 1
    BATCH_END = 2
    FRAME = 4
    BACKWARD_START = 8
    OWN_TIME = 16  # no event: the compiled recorder counts its nanoseconds meanwhile


class Subscription(Protocol):
    """Subscription to some events. `active` may be switched off and on again."""

    active: bool

    def remove(self) -> None:
        """Switch the subscription off."""


Part: TypeAlias = Literal["output", "input", "weight"]


class BackwardCall(NamedTuple):
    """A call that got gradients: its frame, the watched module that made it, and its number.

    Calls are numbered in the order in which they end in the forward, so children come before their parents.
    """

    frame: Frame
    caller: str | None
    number: int


class Arrival(NamedTuple):
    """One row of a backward: the position of its call and of the row, the part of the call it is the gradient of.

    `time` orders the rows. All rows of one gradient have the same, as a module's output is the next one's input.
    """

    call: int
    row: int
    part: Part
    time: int


class Start(NamedTuple):
    """Start of a batch: its outermost call, and the state on which that call depends.

    `generator`: the state of the CPU's random numbers. `autocast`: by device. `versions`: of the tensors among the
    arguments, and `attributes`: of the objects there that have plain ones alone. `elapsed`: seconds since.
    `nodes`: autograd's sequence numbers of the forward's first node and of the first behind it. `is_function`: the
    call of a watched function, which may be a part of the loss. `extra`: what `on_batch_start` has answered.
    """

    batch: int
    module: nn.Module | None  # None once it is gone, or not kept any longer
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    generator: Tensor
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    inference: bool
    grad: bool
    versions: list[tuple[Tensor, int]]
    attributes: list[tuple[object, dict[str, Any]]]
    elapsed: float
    nodes: tuple[int, int]
    is_function: bool
    extra: Any


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
        `is_over`: that call has ended, as its rows came from a device at its end; `on_batch_end` follows.
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


class WatchPart:
    """Part of a Watch that follows its batches. Nothing is called without a subscription of its own or of another part.

    An exception from a part leaves the module call.
    """

    def batch_started(self, batch: int, module: nn.Module | None, args: tuple[Any, ...]) -> None:
        """Take the start of a batch: the call of `module`, or None in compiled code, with these arguments."""

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call."""

    def remove(self) -> None:
        """Leave everything as it was found."""

    def sum_up(self) -> None:
        """Say what is left to say, once everything is removed."""


class Recorder(Protocol):
    """Interface of the two recorders."""

    paused: bool  # read: whether nothing is recorded; set by pause(), resume() and stop()
    keeps_starts: bool  # for `start` and `ended_starts`
    gathers_from: int  # the batch from which on peaks are gathered for `take_peaks`
    gathers_inputs: bool  # among the peaks
    gathers_gradient_peaks: bool  # for `take_gradient_peaks`
    gathers_weights: bool  # from shards, anew in each batch: none is known from the batch before

    def subscribe(self, events: int) -> Subscription:
        """Report these events from now on. Several subscriptions to one event are counted."""

    def start(self) -> Start | None:
        """Return the start of the batch under way in this thread."""

    def ended_starts(self) -> list[Start]:
        """Return the starts of ended batches of which a gradient may still come.

        Of those before the latest batch only their numbers are kept.
        """

    def forget_starts(self) -> None:
        """Forget the starts of ended batches."""

    @property
    def num_other_threads(self) -> int:
        """Return how many other threads are inside a batch."""

    def watch_buffers(self, buffers: list[tuple[weakref.ref[nn.Module], str]], /) -> None:
        """Call `on_batch_start` after a change of these buffers."""

    def watch_name(self, names: dict[str, Any], name: str, /) -> None:
        """Call `on_batch_start` while the name is true."""

    @property
    def latest_batch(self) -> int:
        """Return the number of the latest batch, -1 before the first."""

    @property
    def frames_kept(self) -> int:
        """Return how many frames have ever been among `frames()`."""

    @property
    def counters(self) -> dict[str, int]:
        """Return the numbers of calls, frames, tensors, reads, bytes and cache hits."""

    def add_node(self, name: str, module: object, observed: bool, allow_inf: bool | Excuses) -> int:
        """Return a number for a module, for its WatchedCall; or for an optimizer."""

    def set_allow_inf(self, node: int, allow_inf: bool | Excuses, /) -> None:
        """Give the number to another module of the same name and class."""

    def frames(self) -> list[Frame]:
        """Return the latest frames, oldest first."""

    def frames_since(self, kept: int, /) -> tuple[int, list[Frame]]:
        """Return `frames_kept`, and the latest frames after the first `kept`, both at one moment."""

    def frames_of_batch(self, batch: int, /) -> int | None:
        """Return how many frames of a batch have been among `frames()`; None once 16 later batches have had some."""

    def called(self) -> Iterable[str]:
        """Return the names of the modules that were called and have weights."""

    def take_peaks(self) -> tuple[int, list[PeakName], bytes]:
        """Return `(batch, new, values)`: the peak magnitudes of a batch, and the names that were not returned before.

        `values` are float64 by name, in the order in which the names came, 0 for a name that the batch did not have.
        """

    def take_gradient_peaks(self) -> tuple[int, list[PeakName], bytes]:
        """Return the same of the gradients of all backwards since the last time; the batch is the latest of theirs.

        Names come in the order in which the gradients came first.
        """

    def settle(self) -> None:
        """End the batches, and make frames of the backwards, that an exception ended without a sign."""

    def finish_nonfinite_backward(self) -> None:
        """Make frames of the backward under way in this thread, as far as it has come, if it is non-finite."""

    def add_frame(self, batch: int, node: int, rows: list[Record]) -> None:
        """Keep a frame of an optimizer's step."""

    def call_under_way(self) -> tuple[int, str, str] | None:
        """Return the batch, and name and class of the module, of this thread's innermost call if it is recorded."""

    def outermost(self) -> str | None:
        """Return the name of the module of this thread's outermost call."""

    def add_output(self, label: str, tensor: Tensor) -> None:
        """Give the innermost observed call under way in this thread one more output."""

    def excuse_gradients(self, batches: Sequence[int], note: Note) -> None:
        """Note on every non-finite gradient of these batches why it is meant."""

    def forget_gradients(self, leaves: Sequence[Tensor]) -> None:
        """Look at no more gradients, and take the hooks off the leaves."""

    def unconfirmed_calls(self) -> list[tuple[int, str, str]]:
        """Return the batch, the module and its class of the latest batch's calls that its device has not confirmed."""

    def suspend(self, on: bool, /) -> None:
        """Record nothing until it is called with False as often as with True: for re-runs."""

    def is_finite(self, x: Tensor, /) -> bool | None:
        """Return whether `x` is finite, from its latest reading as a weight if it is unchanged since.

        None where the recorder cannot tell so: on a device, without a version counter, of a dtype without a range.
        """

    def forget_weights(self, groups: list[list[Tensor]] = ..., /) -> None:
        """Read these weights again, or all if none of them is known: they may have changed without a sign."""

    def forget_tensors(self) -> None:
        """Forget all cached reads."""

    def begin_compiled(self, callee: int, plan: str, tensors: Sequence[Tensor]) -> None:
        """Begin a call in compiled code that no watched call of the same graph made; see compile/operators.py."""

    def record_compiled(self, callee: int, caller: int, plan: str, tensors: Sequence[Tensor]) -> None:
        """End a call in compiled code; see compile/operators.py."""


class Subscriptions:
    """Counts the subscriptions to each event; the pure-Python twin of csrc/recorder/call_recorder.h."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal's handler may subscribe at any moment
        self._active: list[_Subscription] = []
        self._mask = 0

    def has(self, event: Event) -> bool:
        """Return whether somebody subscribes to the event."""
        return bool(self._mask & event)

    def add(self, events: int) -> Subscription:
        """Add a subscription, active from now on."""
        added = _Subscription(self, events)
        added.active = True
        return added

    def _switch(self, one: _Subscription, active: bool) -> None:
        with self._lock:
            self._active = [other for other in self._active if other is not one] + [one] * active
            mask = 0
            for other in self._active:
                mask |= other.events
            self._mask = mask


class _Subscription:
    def __init__(self, owner: Subscriptions, events: int) -> None:
        self._owner = owner
        self.events = events

    @property
    def active(self) -> bool:
        return self in self._owner._active

    @active.setter
    def active(self, active: bool) -> None:
        self._owner._switch(self, active)

    def remove(self) -> None:
        self.active = False
