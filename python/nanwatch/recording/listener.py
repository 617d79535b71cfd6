"""What a recorder is told to look at, whom it tells what, and what can be asked of it.

Two recorders do the same work; see recorder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor, nn

from ..report.frame import FrameRows
from ..report.record import Row
from .backward import Arrival, BackwardCall
from .largest import Name
from .masked_scores import MaskedScores

Check: TypeAlias = Literal["auto", "module", "batch", "async"]


class Parts(Protocol):
    """Which tensors of a call are read."""

    @property
    def weights(self) -> bool: ...  # noqa: D102
    @property
    def buffers(self) -> bool: ...  # noqa: D102
    @property
    def inputs(self) -> bool: ...  # noqa: D102
    @property
    def outputs(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Settings:
    """What a recorder looks at and keeps; see `watch`."""

    max_frames: int = 21
    every: int = 1
    traced: tuple[int, ...] = ()
    weights: bool = True
    buffers: bool = True
    inputs: bool = True
    outputs: bool = True
    reread_weights: int = 64
    verify_hits: bool = False
    measure_time: bool = False
    gradients: bool = False
    counts: bool = False
    check: Check = "auto"


class Listener(Protocol):
    """Who is told. What these raise, the module call raises."""

    def batch_started(
        self, batch: int, traced: bool, module: nn.Module | None, args: tuple[Any, ...], kwargs: Any
    ) -> object:
        """The call `module(*args, **kwargs)` begins a batch (kwargs may be None; all are unknown in compiled code).

        Told of the batches that are looked at: of all while `tells_batch_start` is set, else of the traced ones. The
        recorder holds the answer while the batch is under way, and after that until no gradient of it can come any
        more, as far as it follows gradients. It lets go of the answer in any thread.
        """

    def frame_recorded(self, frame: FrameRows) -> None:
        """A call was recorded. Told of traced batches, and of all while `tells_frames` is set."""

    def fault(self, frame: FrameRows, caller: str | None, args: tuple[Any, ...], kwargs: Any) -> None:
        """A call held a non-finite value.

        `caller` is the watched module that made it; `args` and `kwargs` (or None) are the outermost call's.
        """

    def batch_ended(self, batch: int, completed: bool) -> None:
        """An outermost call returned (`completed`) or raised. Told of the former only while `tells_batch_end` is set.

        What it raised is then `sys.exc_info()[1]`, and only what is raised from that takes its place. Calls of watched
        modules made from here, or from `fault`, are not recorded.
        """

    def backward_started(self) -> None:
        """The first gradient of a backward came, and none has been accumulated. Told while `tells_backward_start`."""

    def backward_ended(self, calls: list[BackwardCall], arrivals: list[Arrival], left: object = None) -> None:
        """A backward ended in which a gradient was not finite; its frames are not yet among `frames()`.

        `left`: what `backward_left` answered at its end, where this is told later.
        """

    # Of rows that a device makes there is news only when the host looks. CallRecorder alone calls these.

    def backward_left(self) -> object:
        """A backward ended whose rows are still to come, or those of its forward. The answer is kept with it."""

    def late_fault(self, frame: FrameRows, caller: str | None, given: FrameRows, is_left: bool) -> None:
        """As `fault`, told when the rows of the batch have come. `given`: what it was called with, as at its end.

        `is_left`: its end is behind this thread, and `batch_looked_at` follows; else `batch_ended` does.
        """

    def batch_left(self, batch: int, completed: bool) -> None:
        """As `batch_ended`, of a batch whose rows are still to come."""

    def warn(self, message: str) -> None:
        """Warn of something in the user's run."""

    def batch_looked_at(self, batch: int, completed: bool) -> None:
        """All frames of a batch have been told that was left before. Told if one was faulty or `tells_batch_end`."""


class Recorder(Protocol):
    """What the two recorders have in common."""

    paused: bool  # read: whether nothing is recorded; set by pause(), resume() and stop()
    tells_batch_start: bool
    tells_batch_end: bool
    tells_frames: bool
    gathers_largest: bool  # for `take_largest`
    tells_backward_start: bool
    awaits_backwards: bool  # at their ends; else those whose rows are late are told of later
    gathers_weights: bool  # from shards, anew in each batch: none is known from the batch before
    watch: int  # by which compiled code finds it; see _live

    @property
    def latest_batch(self) -> int:
        """The number of the latest batch, -1 before the first."""

    @property
    def frames_kept(self) -> int:
        """How many frames there have been among `frames()`; one whose rows are still to come is not yet."""

    @property
    def counters(self) -> dict[str, int]:
        """How many calls, frames, tensors, reads, bytes and cache hits there were."""

    def add_node(self, name: str, module: object, observed: bool, allow_inf: bool | MaskedScores) -> int:
        """A number for a module, for its WatchedCall; or for an optimizer."""

    def frames(self) -> list[FrameRows]:
        """The latest frames, oldest first."""

    def frames_since(self, kept: int, /) -> tuple[int, list[FrameRows]]:
        """How many frames there have been, and the latest of those after the first `kept`, both at one moment."""

    def frames_of_batch(self, batch: int, /) -> int | None:
        """How many frames of a batch there have been among `frames()`; None where 16 later batches have had some."""

    def take_largest(self) -> tuple[int, list[Name], bytes]:
        """`(batch, new, values)`: the largest magnitudes of a batch, and the names of those that were never taken.

        `values` are float64, by name in the order in which the names came, 0 for what the batch had not.
        """

    def finish_broken_backwards(self) -> None:
        """Make frames of the backwards that ended by an exception."""

    def finish_bad_backward(self) -> None:
        """Make frames of the backward under way in this thread, as far as it has come, if something in it is bad."""

    @property
    def gradient_sums_may_overflow(self) -> bool:
        """Whether gradients that were finite may have added up in some weight to what is not."""

    def forget_gradient_sums(self) -> None:
        """They were looked at."""

    def add_frame(self, batch: int, node: int, rows: list[Row]) -> None:
        """Keep a frame of an optimizer's step."""

    def excuse_gradients(self, batches: Sequence[int], note: str) -> None:
        """Note on every gradient of these batches that is not finite why it is no fault."""

    def forget_gradients(self, leaves: Sequence[Tensor]) -> None:
        """Look at no more gradients, and take the hooks off the leaves."""

    def pending_frames(self) -> list[FrameRows]:
        """Frames that are complete, but wait to be told with the rest of their batch; oldest first."""

    def look(self, wait: bool) -> None:
        """Tell of the batches that have ended and whose rows have come; with `wait`, of all that have ended."""

    @property
    def has_devices(self) -> bool:
        """Whether there are devices whose rows it has late."""

    @property
    def may_be_late(self) -> bool:
        """Whether there may be batches that are still to be told of, replays of a CUDA graph among them."""

    def await_before_step(self) -> None:
        """Wait for the rows of all that a step may take, unless it is captured; then `look(False)`.

        Left out are forwards without grad mode, unless one was run again in the backward since.
        """

    def suspend(self, on: bool, /) -> None:
        """Record nothing until it is called with False as often as with True: for re-runs."""

    def forget_weights(self) -> None:
        """Weights may have changed without a sign: read them again."""

    def forget_tensors(self) -> None:
        """Let go of all that is remembered of tensors."""

    def begin_compiled(self, callee: int, tensors: Sequence[Tensor]) -> None:
        """A call in compiled code begins that no watched call of the same graph made; see `compile_ops.begin_`."""

    def record_compiled(self, callee: int, caller: int, plan: str, tensors: Sequence[Tensor]) -> None:
        """A call in compiled code has ended; see `compile_ops.record_`."""
