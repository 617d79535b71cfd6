"""`watch`, and the Watch that it returns: a recorder on a model, and the parts that act on its events."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..instrumentation.calls import Attachment, check_model
from ..instrumentation.wrapped_names import named_modules, original_module
from ..monitoring.monitor import Monitor
from ..recording.events import Arrival, BackwardCall, Check, Event, Recorder
from ..recording.recorder import make_recorder
from ..report import text
from ..report.record import Frame, FrameRows
from ..report.report import BatchLimitError, Report
from ..trace.tracer import Tracer, ring_size, start_tracer
from ..util.visible import warn_user
from .failure_handler import FailureHandler
from .optimizer_guard import OptimizerGuard, SkippedStep, is_inside_step
from .optimizer_steps import BackwardWatch, OptimizerSteps
from .options import OnNonfinite, Options, check_options
from .reports import Reports
from .rerun_policy import RerunPolicy
from .suspicion import Suspicion


def watch(
    model: nn.Module,
    *,
    max_frames: int = 21,
    on_nonfinite: OnNonfinite = "raise",
    check: Check = "auto",
    weights: bool = True,
    buffers: bool = True,
    inputs: bool = True,
    outputs: bool = True,
    gradients: bool = False,
    counts: bool = False,
    max_skipped_steps: int = 20,
    scaler: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    allow_inf: str | Iterable[str] = (),
    every: int = 1,
    reread_weights: int = 64,
    trace_batches: Iterable[int] = (),
    trace: str | os.PathLike[str] | None = None,
    log_to: Any = None,
    log_every: int = 50,
    abort_after_batch: int | None = None,
    forecast: bool = True,
    microscope: bool | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    peer_timeout: float = 30.0,
    enabled: bool = True,
    _measure_time: bool = False,
    _verify_hits: bool = False,
    _room: int = 0,
) -> Watch:
    """Start to watch `model` and return the Watch, which is also a context manager.

    Args:
        model: any nn.Module, also a compiled one. Modules that it gets later are watched too.
        max_frames: keep this many of the latest frames.
        on_nonfinite: "raise" a NonFiniteError; "warn" when non-finite values begin, change or end, and in sum at
            `stop()` (docs/watching.md); only "record"; or a callable that gets the Report of each non-finite batch. A
            callable lives until the model is freed or `stop()`. If it refers to the model, it keeps the model alive.
        check: when to act on a non-finite value: at the "module" that holds it, at the end of the "batch", or "async",
            when the device has delivered, at most one batch later. An optimizer's step waits for the forwards since the
            last step, so that their failure is raised before a parameter changes (docs/cuda.md). The report is the
            same. "auto" is "module" for tensors of the CPU, which are read without a wait, and "batch" for those of a
            GPU. On the CPU "async" is "batch".
        weights, buffers, inputs, outputs: which tensors to read; of the buffers, those of floating point.
        gradients: in every backward, read the gradients of the tensors that are read in the forward. Act on a failure
            when an optimizer's step is about to take it, before any weight changes (docs/gradients.md). On a GPU that
            step waits for them once, unless a GradScaler has. Without it no gradient is read.
        counts: count zeros, subnormals, nans and infinities of every tensor, for its record's `health` and the columns
            of a trace, and for a trace its elements by power of two (docs/formats.md). This reads each tensor three
            times more and waits for a GPU: use it for a few batches, or with `every`.
        max_skipped_steps: how many steps in a row a GradScaler may skip; one more is a failure. A scale of 65536 is
            down to 1 after 16. Needs `gradients`.
        scaler: the GradScaler, whose scale each skipped step reports. None looks for the one that is in use. Needs
            `gradients`.
        optimizer: an optimizer whose state is read after each of its steps: moments, weights of its own.
        include, exclude: glob patterns on the names of modules, such as "encoder.block.*"; `*` crosses dots. Names are
            those in your own model, without what DistributedDataParallel and other wrappers put before them.
        allow_inf: glob patterns on the names of modules whose infinities are meant; a nan in them still counts.
            Additive attention masks are recognised without it.
        every: read only every n-th batch.
        reread_weights: read a weight again after this many batches though nothing says that it changed; 1 is always.
            An optimizer's step, `load_state_dict` and writes that PyTorch sees are noticed at once.
        trace_batches: numbers of batches, from 0, whose frames are printed as they come.
        trace: a file (`run.parquet`) or a folder to write every frame into, one row per record, while the run lasts;
            with `trace_batches` only the frames of these batches, which are then not printed. A path that is taken gets
            a number, and with several processes the rank: see `Watch.trace_path`. Needs `pyarrow` (docs/traces.md).
        log_to: where to log headroom by module, ranges, forecasts and whether all was finite: a SummaryWriter of
            TensorBoard, a run of wandb, the path of a folder for TensorBoard, or a callable that takes a dict of them
            and the number of the batch (docs/trackers.md). An exception of it is one warning, and the end of the log.
        log_every: log every n-th batch, fewer where that would take more than 2 % of the time; failures at once. Needs
            `log_to`.
        abort_after_batch: raise BatchLimitError at the end of the batch of this number.
        forecast: warn of the module that will overflow first, when its headroom shrinks so steadily that the batch can
            be foretold; at most three lines in 10,000 batches. Reads each of the first batches, then fewer, down to one
            in 16 (docs/watching.md).
        microscope: after a failure run the batch once more to find the operation and the line that made the first
            non-finite value, and to try cures. Until then it costs a few microseconds a batch. None does so where the
            failure ends the batch ("raise"); True also where the run goes on and a model with a state of its own may
            notice a second forward.
        output_dir: a folder into which each failure's report (text, JSON, HTML) and capsule are written.
        peer_timeout: in a job of several ranks, how many seconds a rank that fails, or learns that another has, waits
            at most for all to agree where it began. Then each raises an error that says so. Only with "raise". 0 does
            without: each rank speaks for itself, and the others may hang (docs/distributed.md).
        enabled: False makes a Watch that watches nothing. The environment goes first: NANWATCH=0 or NANWATCH=1.

    Raises TypeError or ValueError, naming what was given and what is accepted, for a `model` that is no module whose
    calls can be seen, an option without meaning or effect, and an `output_dir` or `trace` where nothing can be written;
    ImportError, naming the package, where `trace` or `log_to` needs one that is not installed.
    """
    check_model(model)
    model = original_module(model)
    given = {name: value for name, value in locals().items() if name in Options.__dataclass_fields__}
    options = check_options([one.name for one in named_modules(model)], given)
    return Watch(model, options, measure_time=_measure_time, verify_hits=_verify_hits, room=_room)


class Watch:
    """A model being watched, from its construction by `watch` to `stop()`.

    The model computes what it computed before. A Watch keeps no tensor alive and builds no graph. Copies and pickles of
    the model are not watched.
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
        # The recorder may hold more frames than are shown: `room` for those who read them batch by batch.
        ring = max(options.max_frames, room)
        fetches = options.trace is not None and not options.trace_batches
        if fetches:
            # Frames of chosen batches come one by one. All others are fetched from a recorder that holds enough.
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
        self._batch_ends = self._recorder.subscribe(Event.BATCH_END)
        self._batch_ends.active = (
            self._monitor.awaits_batches or self._tracer is not None or options.abort_after_batch is not None
        )
        guard = OptimizerGuard(self._recorder, options) if options.gradients and options.enabled else None
        suspicion = Suspicion(model, options.observes, self._monitor.growth)
        self._reports = Reports(model, self._recorder, options.max_frames, suspicion)
        rerun = RerunPolicy(model, options)
        self._failures = FailureHandler(
            model, options, self._recorder, self._monitor, self._reports, rerun, guard
        )
        self._backward: BackwardWatch | None = None
        if guard is not None:
            self._backward = BackwardWatch(model, self._recorder, self._reports, self._failures, guard)
        self._steps: OptimizerSteps | None = None
        self._attachment: Attachment | None = None
        if options.enabled:
            self._steps = OptimizerSteps(
                model, self._recorder, options, self._reports, self._failures, self._backward
            )
            self._attachment = Attachment(
                model, self._recorder, options.observes, options.allows_inf, options.parts
            )

    def __repr__(self) -> str:
        model = self._model()
        name = "a model that is gone" if model is None else type(model).__name__
        num_batches = self._recorder.latest_batch + 1
        state = "paused" if self._recorder.paused else "watching"
        if self._attachment is None or not self._attachment.is_attached:
            state = "switched off" if self._attachment is None else "stopped"
        return f"<Watch of {name}: {num_batches:,} batch{'' if num_batches == 1 else 'es'}, {state}>"

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.look()
            self._failures.run_ended(error)
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
        """Wait for all rows that a device still holds, and act on them as at the end of a batch. Nothing on a CPU.

        With check="async" nothing else waits for the last batch, but an optimizer's step and `stop()`.
        """
        self._failures.raise_postponed()
        self._recorder.poll(True)

    def _leave(self) -> None:
        self._reports.look_at_mesh()
        for part in (self._steps, self._backward, self._attachment):
            if part is not None:
                part.remove()
        if self._tracer is not None:
            self._tracer.close()
        try:
            self._failures.watch_ends()
        finally:
            self._failures.close()
            self._monitor.close()

    def pause(self) -> None:
        """Record nothing until `resume()`; batches meanwhile are not counted."""
        self._failures.poll(wait=self._options.check != "async")
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
        """The path of the trace: a folder of parts until `stop()`. None without `trace`."""
        return None if self._tracer is None else self._tracer.writer.path

    @property
    def skipped_steps(self) -> tuple[SkippedStep, ...]:
        """The latest hundred steps that were skipped because gradients were not finite, oldest first."""
        self._settle()
        return () if self._backward is None else tuple(self._backward.guard.skipped)

    @property
    def counters(self) -> dict[str, int]:
        """Counts so far: calls, frames, tensors (seen), tensors_read, bytes_read, cache_hits, skipped_steps."""
        self._settle()
        num_skipped = 0 if self._backward is None else self._backward.guard.num_skipped
        return {**self._recorder.counters, "skipped_steps": num_skipped}

    def report(self) -> Report:
        """Return the report of the latest failure, or of the latest frames when there was none.

        Of several non-finite batches in a row it is the report of the first, because the later ones are its
        consequence. With check="async" it covers the rows that have come so far. `look()` waits for the rest.
        """
        frames = self.frames
        failure = self._failures.batches.failure
        if failure is None and self._backward is not None:
            failure = self._backward.guard.pending
        return failure or self._reports.of(frames, None, self.batch)

    @property
    def _ended_by_exception(self) -> bool:
        """True if the latest batch ended by an exception."""
        return self._failures.ended_by_exception

    def _settle(self) -> None:
        self._failures.poll(wait=self._options.check != "async")
        if self._backward is not None:
            self._backward.settle()

    # The recorder calls the methods below. RecorderEvents describes them.

    def on_batch_start(
        self, batch: int, traced: bool, module: nn.Module | None, args: tuple[Any, ...], kwargs: Any
    ) -> object:
        """Print the header of a traced batch, and keep its start for a re-run."""
        self._failures.raise_postponed()
        if traced and self._options.trace is None:
            _print_lines(text.batch_lines(batch))
        return self._failures.batch_started(batch, module, args, kwargs)

    def on_frame(self, frame: FrameRows) -> None:
        """Hand the frame to the monitor, and print it or write it to the trace, if its batch is traced."""
        self._monitor.add(frame)
        if frame.batch not in self._options.trace_batches:
            return
        if self._options.trace is None:
            _print_lines(text.frame_lines(frame.to_frame()))
        elif self._tracer is not None:
            self._tracer.add(frame)

    def on_nonfinite(self, frame: FrameRows, caller: str | None, args: tuple[Any, ...], kwargs: Any) -> None:
        """Hand the call to the failure handler, which may act on it at once."""
        self._failures.nonfinite_call(frame, caller, args, kwargs)

    def on_pending_nonfinite(
        self, frame: FrameRows, caller: str | None, given: FrameRows, is_left: bool
    ) -> None:
        """Hand the call to the failure handler, which acts at the batch's end."""
        self._failures.pending_nonfinite_call(frame, caller, given, is_left)

    def on_batch_end(self, batch: int, completed: bool) -> None:
        """Act on the batch's failure where that was put off; end the run when asked to."""
        try:
            self._failures.forward_left(batch, completed)
            self.on_pending_batch_end(batch, completed)
        finally:
            self._failures.batch_ended(batch)
        self._check_limit(batch, completed)

    def on_batch_pending(self, batch: int, completed: bool) -> None:
        """End a batch like `on_batch_end`, except for its failure, which is not known yet."""
        try:
            self._failures.forward_left(batch, completed)
        finally:
            self._failures.batch_ended(batch)
        self._check_limit(batch, completed)

    def on_pending_batch_end(self, batch: int, completed: bool) -> None:
        """Act on the failure of a batch whose frames are all known."""
        if self._tracer is not None:
            self._tracer.batch_ended()
        self._failures.conclude(batch, completed)

    def on_warning(self, message: str) -> None:
        """Warn the user."""
        warn_user(message)

    def _check_limit(self, batch: int, completed: bool) -> None:
        if completed and batch == self._options.abort_after_batch:
            raise BatchLimitError(batch, "abort_after_batch")

    def on_backward_start(self) -> None:
        """Find out whether the gradients of the deferred backward are gone."""
        if self._backward is not None:
            self._backward.guard.settle()

    def on_backward_pending(self) -> object:
        """Return the present scale of the GradScaler, for `on_backward_end`."""
        return None if self._backward is None else self._backward.guard.note_scale()

    def on_backward_end(
        self, calls: list[BackwardCall], arrivals: list[Arrival], left: object = None
    ) -> None:
        """Defer the failure until a step is about to take it, unless the forward's failure caused it."""
        self._failures.poll(wait=True)
        if is_inside_step():  # a closure's backward: the step changes the weights next
            self._failures.raise_postponed()
        if self._backward is not None:
            self._backward.ended(calls, arrivals, left)


def _print_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
