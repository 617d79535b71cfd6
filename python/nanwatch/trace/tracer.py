"""Tracer: takes the frames out of a recorder and passes them to the writer of the trace."""

from __future__ import annotations

import atexit
import threading
import weakref
from errno import EDQUOT, ENOSPC
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import torch
from torch import nn

from .._version import __version__
from ..recording.events import Recorder
from ..util.job import rank_and_world_size
from ..util.messages import warn_user
from ..util.program import each_module
from . import columns
from .trace_writer import TraceWriter, claim

if TYPE_CHECKING:
    from ..records.record import Frame

# A frame takes 3.4 µs to fetch, while nobody else runs Python. So the recorder holds several batches, and is asked when
# it is nearly full, or once a second.
_LEAST_RING = 1024
_RING_PER_MODULE = 3
_GATHER_SECONDS = 1.0
# Batches that are larger than was thought, as the loops of a model may make them, are watched more closely.
_HURRIED_SECONDS = 0.02


def ring_size(model: nn.Module) -> int:
    """Return how many frames the recorder should hold while every batch of this model is traced."""
    return max(_LEAST_RING, _RING_PER_MODULE * sum(1 for _ in each_module(model)))


class Tracer:
    """The training's side of a trace, which hands frames over and does not wait.

    `ring` is how many frames the recorder holds. With 0 the frames are not fetched but given, one by one, to `add`.
    """

    def __init__(self, path: Path, recorder: Recorder, ring: int, rank: int, every: int) -> None:
        self._recorder = recorder
        self._ring = ring
        self._given: list[Frame] = []
        self._taken = 0  # how many frames there had been when they were last fetched
        self._ended = 0  # and when the latest batch had ended
        self._largest = 0  # batch, in frames
        self._fetched = monotonic()
        # Not a plain lock: the garbage collector may run anybody's code within, and that may call the model.
        self._lock = threading.RLock()
        self._gathers = False
        columns.arrow("pyarrow.parquet", "trace=")
        facts = {
            "version": columns.VERSION,
            "nanwatch": __version__,
            "torch": str(torch.__version__),
            "rank": rank,
            "every": every,
            "lost_frames": 0,
        }
        # Weakly: the thread must not keep the watch.
        tick = partial(_tick, weakref.ref(self))
        self.writer = TraceWriter(claim(path), facts, tick)
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def add(self, frame: Frame) -> None:
        """Take a frame, where frames are given."""
        self._given.append(frame)

    def note(self, frame: Frame) -> None:
        """Take a frame that no call made, behind those that there are."""
        self.gather()
        self.writer.put([frame])

    def batch_ended(self) -> None:
        """Take the frames of the batch if the recorder has no room for those of another one."""
        if self._ring == 0 or not self.writer.is_open:
            self.gather()
            return
        num_kept = self._recorder.frames_kept
        self._largest = max(self._largest, num_kept - self._ended)
        self._ended = num_kept
        if num_kept - self._taken + self._largest > self._ring:
            self.gather()

    def tick(self) -> float:
        """Take the frames if it is time. Return in how many seconds to call again. The writing thread calls this."""
        hurries = self._ring > 0 and (self._largest == 0 or 2 * self._largest > self._ring)
        waiting = self._recorder.frames_kept - self._taken if self._ring else len(self._given)
        is_late = monotonic() - self._fetched >= _GATHER_SECONDS
        if waiting and (is_late or (hurries and 2 * waiting > self._ring)):
            self.gather()
        return _HURRIED_SECONDS if hurries else _GATHER_SECONDS

    def gather(self) -> None:
        """Hand over all frames that there are."""
        if not self.writer.is_open:
            self._given.clear()
            return
        with self._lock:
            if self._gathers:  # called within: what is new is for the next time
                return
            self._gathers, self._fetched = True, monotonic()
            try:
                if self._ring == 0:
                    frames, self._given = self._given, []
                else:
                    num_made, frames = self._recorder.frames_since(self._taken)
                    self.writer.lose(num_made - self._taken - len(frames))
                    self._taken = num_made
                self.writer.put(frames)
            finally:
                self._gathers = False

    def close(self) -> None:
        """Hand over the last frames and wait, not for long, until they are on disk. A second time does nothing."""
        atexit.unregister(self._at_exit)
        self.gather()
        self.writer.close()

    def __del__(self) -> None:
        # The watch went away with its model, without stop(). The thread goes on until all is written.
        if hasattr(self, "_at_exit"):
            atexit.unregister(self._at_exit)
            self.gather()
            self.writer.close(waits=False)


def start_tracer(path: Path, recorder: Recorder, ring: int, every: int) -> Tracer | None:
    """Make a Tracer; None, with a warning, where the disk is full. Any other obstacle to a file is raised."""
    rank, world_size = rank_and_world_size()
    if world_size > 1:
        path = path.with_name(f"{path.name.removesuffix(columns.SUFFIX)}-rank{rank}{columns.SUFFIX}")
    try:
        return Tracer(path.absolute(), recorder, ring, rank, every)  # the run may change its folder
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        warn_user(f"nanwatch: there is no trace, as {error}; the run goes on")
        return None


def _tick(reference: weakref.ref[Tracer]) -> float:
    tracer = reference()
    return _GATHER_SECONDS if tracer is None else tracer.tick()


def _close(reference: weakref.ref[Tracer]) -> None:
    if (tracer := reference()) is not None:
        tracer.close()
