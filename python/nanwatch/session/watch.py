"""A model being watched: a recorder on it, and what is done when a value is not finite."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from ..instrumentation.calls import Attachment
from ..monitoring.monitor import Monitor
from ..recording.events import Arrival, BackwardCall, Event, Recorder
from ..recording.recorder import make_recorder
from ..report import text
from ..report.errors import BatchLimitError, NonFiniteError
from ..report.frame import Frame, FrameRows
from ..report.report import Report
from ..trace.tracer import Tracer, ring_size, start_tracer
from ..util.job import rank as _rank
from ..util.user_warning import warn_user
from .backward_watch import BackwardWatch
from .failure_handler import FailureHandler
from .optimizer_guard import SkippedStep, is_inside_step
from .options import Options
from .pre_step_check import PreStepCheck
from .reports import Reports


class Watch:
    """A model being watched, from its construction by `watch` to `stop()`.

    The model computes what it computed before; no tensor is kept alive and no graph is built. In a copy or a pickle
    of the model nothing is watched.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        measure_time: bool = False,
        verify_hits: bool = False,
        room: int = 0,
    ) -> None:
        self._options = options
        self._model = weakref.ref(model)
        this = weakref.ref(self)
        # An error that was found while a report was asked for, which is no place to raise it.
        self._postponed: NonFiniteError | None = None
        # The recorder may hold more frames than are shown: `room` for those who read them batch by batch.
        ring = max(options.max_frames, room)
        fetches = options.trace is not None and not options.trace_batches
        if fetches:
            # Frames of chosen batches come one by one; all others are fetched from a recorder that holds enough.
            ring = max(ring, ring_size(model))
        settings = options.recorder_settings(
            max_frames=ring, verify_hits=verify_hits, measure_time=measure_time
        )
        self._recorder: Recorder = make_recorder(settings, self)
        self._tracer: Tracer | None = None
        if options.trace is not None and options.enabled:
            self._tracer = start_tracer(
                options.trace, self._recorder, ring if fetches else 0, options.every, model
            )
        self._monitor = Monitor(
            self._recorder,
            model,
            every=options.every,
            forecasts=options.forecast and options.enabled,
            log_to=options.log_to if options.enabled else None,
            log_every=options.log_every,
        )
        self._reports = Reports(model, self._recorder, options.max_frames)
        self._failures = FailureHandler(
            model,
            options,
            self._recorder,
            self._monitor,
            self._reports,
            lambda: None if (own := this()) is None else own._backward.release(),
        )
        self._batch_starts = self._recorder.subscribe(Event.BATCH_START)
        self._batch_starts.active = self._failures.awaits_batch_start
        self._batch_ends = self._recorder.subscribe(Event.BATCH_END)
        self._batch_ends.active = self._awaits_batch_end()
        self._attachment: Attachment | None = None
        # Before what looks at backwards: what a forward did wrong came first.
        self._pre_step_check = PreStepCheck(
            model,
            self._recorder,
            options,
            lambda: None if (own := this()) is None else own._raise_postponed(),
            lambda optimizer: None if (own := this()) is None else own._backward.step_follows(optimizer),
        )
        self._backward = BackwardWatch(
            model,
            self._recorder,
            options,
            self._reports,
            rank=_rank,
            act=self._failures.step_follows,
            failed=self._failures.rerun.backward_failed,
            let_go=self._failures.rerun.let_go,
        )
        if options.enabled:
            parts = {"w": options.weights, "b": options.buffers, "i": options.inputs, "o": options.outputs}
            self._attachment = Attachment(
                model,
                self._recorder,
                options.observes,
                options.allows_inf,
                "".join(letter for letter, wanted in parts.items() if wanted),
            )

    def __repr__(self) -> str:
        model = self._model()
        name = "a model that is gone" if model is None else type(model).__name__
        num_batches = self._recorder.latest_batch + 1
        if self._attachment is None:
            state = "switched off"
        elif not self._attachment.is_attached:
            state = "stopped"
        else:
            state = "paused" if self._recorder.paused else "watching"
        return f"<Watch of {name}: {num_batches:,} batch{'' if num_batches == 1 else 'es'}, {state}>"

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.look()
                self._failures.run_ended()
            else:
                self._take_in(wait=True)
                self._postponed = None  # the error under way says more
                self._failures.explain(error)
        finally:
            self._leave()

    def stop(self) -> None:
        """`look()`, and leave the model as it was found; the frames stay. A second time does nothing.

        A trace is whole on disk when this returns, or, with a slow disk, after a warning 10 s later.
        """
        try:
            self.look()
        finally:
            self._leave()

    def look(self) -> None:
        """Wait for what a device has still to deliver, and act on it as at the end of a batch.

        For check="async", whose last batch nothing else waits for if no optimizer's step follows: `stop()` does this
        too. Does nothing on a CPU.
        """
        self._raise_postponed()
        self._recorder.poll(True)

    def _leave(self) -> None:
        self._reports.look_at_mesh()
        self._pre_step_check.remove()
        self._backward.remove()
        if self._attachment is not None:
            self._attachment.remove()
        if self._tracer is not None:
            self._tracer.close()
        try:
            self._failures.watch_ends()
        finally:
            self._failures.close()
            self._monitor.close()

    def pause(self) -> None:
        """Record nothing until `resume()`; batches meanwhile are not counted."""
        self._take_in(wait=self._options.check != "async")
        self._recorder.paused = True

    def resume(self) -> None:
        """Record again. Does nothing after `stop()`."""
        self._recorder.poll(False)  # replays of CUDA graphs meanwhile are no batches either
        self._recorder.paused = False

    @property
    def batch(self) -> int | None:
        """The number of the latest batch, counted from 0; None before the first."""
        latest = self._recorder.latest_batch
        return None if latest < 0 else latest

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The latest frames, oldest first, at most `max_frames`. Those of a backward come when it is over."""
        self._settle()
        frames = [*self._recorder.frames(), *self._recorder.pending_frames()]
        return tuple(frame.to_frame() for frame in frames[-self._options.max_frames :])

    @property
    def trace_path(self) -> Path | None:
        """Where the trace is written: a folder of parts until `stop()`. None without `trace`."""
        return None if self._tracer is None else self._tracer.writer.path

    @property
    def skipped_steps(self) -> tuple[SkippedStep, ...]:
        """The latest hundred of the steps that were skipped, as gradients were not finite, oldest first."""
        self._settle()
        return self._backward.skipped

    @property
    def counters(self) -> dict[str, int]:
        """What was done so far: calls, frames, tensors (seen), tensors_read, bytes_read, cache_hits, skipped_steps."""
        self._settle()
        return {**self._recorder.counters, "skipped_steps": self._backward.num_skipped}

    def report(self) -> Report:
        """Return the report of the latest failure, or of the latest frames when there was none.

        When several batches on end were non-finite it is the report of the first of them, as it was at its first
        non-finite value: what came later is its consequence. With check="async" it is what has come so far; `look()`
        waits for the rest.
        """
        frames = self.frames
        failure = self._failures.batches.failure or self._backward.held
        return failure or self._reports.of(frames, None, self.batch)

    @property
    def _ended_by_exception(self) -> bool:
        """Whether the latest batch ended by an exception."""
        return self._failures.ended_by_exception

    def _settle(self) -> None:
        self._take_in(wait=self._options.check != "async")
        self._backward.settle()

    def _take_in(self, *, wait: bool) -> None:
        try:
            self._recorder.poll(wait)
        except NonFiniteError as error:
            self._postponed = error
            self._batch_starts.active = True

    def _raise_postponed(self) -> None:
        error, self._postponed = self._postponed, None
        if error is not None:
            self._batch_starts.active = self._failures.awaits_batch_start
            raise error

    # The recorder calls the methods below; see RecorderEvents.

    def on_batch_start(
        self, batch: int, traced: bool, module: nn.Module | None, args: tuple[Any, ...], kwargs: Any
    ) -> object:
        """Print the header of a traced batch; keep what a second run would need. See RecorderEvents."""
        self._raise_postponed()
        if traced and self._options.trace is None:
            _print_lines(text.batch_lines(batch))
        return self._failures.batch_started(batch, module, args, kwargs)

    def on_frame(self, frame: FrameRows) -> None:
        """Print a frame of a traced batch, or write it where `trace` says so; learn what is seen over the batches."""
        self._monitor.add(frame)
        if frame.batch not in self._options.trace_batches:
            return
        if self._options.trace is None:
            _print_lines(text.frame_lines(frame.to_frame()))
        elif self._tracer is not None:
            self._tracer.add(frame)

    def on_nonfinite(self, frame: FrameRows, caller: str | None, args: tuple[Any, ...], kwargs: Any) -> None:
        """Report the first fault of a batch; when acting on it is due here, act."""
        self._failures.nonfinite_call(frame, caller, args, kwargs)

    def on_pending_nonfinite(
        self, frame: FrameRows, caller: str | None, given: FrameRows, is_left: bool
    ) -> None:
        """Report the first fault of a batch; what is due follows with the batch's end."""
        self._failures.late_nonfinite_call(frame, caller, given, is_left)

    def on_batch_end(self, batch: int, completed: bool) -> None:
        """Act on the batch's fault where that was put off; end the run when asked to."""
        try:
            self._failures.forward_left(batch, completed)
            self._conclude(batch, completed)
        finally:
            self._failures.rerun.batch_ended(batch)
            self._batch_ends.active = self._awaits_batch_end()
            self._failures.update_subscription()
        self._check_limit(batch, completed)

    def on_batch_pending(self, batch: int, completed: bool) -> None:
        """End a batch like `on_batch_end`, except for its failure, which is not known yet."""
        try:
            self._failures.forward_left(batch, completed)
        finally:
            self._failures.rerun.batch_ended(batch)
        self._check_limit(batch, completed)

    def on_pending_batch_end(self, batch: int, completed: bool) -> None:
        """Act on the fault of a batch that was left."""
        try:
            self._conclude(batch, completed)
        finally:
            self._batch_ends.active = self._awaits_batch_end()
            self._failures.update_subscription()

    def on_warning(self, message: str) -> None:
        """See RecorderEvents."""
        warn_user(message)

    def _conclude(self, batch: int, completed: bool) -> None:
        if self._tracer is not None:
            self._tracer.batch_ended()
        self._failures.conclude(batch, completed)

    def _check_limit(self, batch: int, completed: bool) -> None:
        if completed and batch == self._options.abort_after_batch:
            raise BatchLimitError(batch, "abort_after_batch")

    def on_backward_start(self) -> None:
        """See RecorderEvents."""
        self._backward.started()

    def on_backward_pending(self) -> object:
        """See RecorderEvents."""
        return self._backward.left()

    def on_backward_end(
        self, calls: list[BackwardCall], arrivals: list[Arrival], left: object = None
    ) -> None:
        """Hold the failure until a step is about to take it, unless it is what came of the forward's."""
        self._take_in(wait=True)
        if is_inside_step():  # a closure's backward: the step changes the weights next
            self._raise_postponed()
        self._backward.ended(calls, arrivals, self._failures.batches, left)

    def _awaits_batch_end(self) -> bool:
        return (
            self._failures.awaits_batch_start
            or self._monitor.awaits_batches
            or self._tracer is not None
            or self._options.abort_after_batch is not None
        )


def _print_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
