"""The Watch of a model: a recorder, the receiver of its events, and the parts that act on them."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..audit.audit import UpdateAudit
from ..blackbox.process import open_box
from ..diagnosis.incident import write_spike
from ..history.monitor import Monitor
from ..history.spikes import SpikeWatch
from ..instrumentation.attention import AttentionLogits, AttentionWatch
from ..instrumentation.calls import Attachment
from ..instrumentation.global_hooks import GlobalHooks, weakly
from ..ranks.replicas import ReplicaWatch, StepRanks
from ..recording.events import Arrival, BackwardCall, Event
from ..recording.recorder import make_recorder
from ..records.record import Frame
from ..report.events import ReplicaDifference, SkippedStep, SpikeReport, UpdateFinding
from ..report.report import Report
from ..scan.guard import CheckpointGuard
from ..sinks.sink import SinkStream, Warnings
from ..sinks.targets import sink_for
from ..trace.trace_writer import ring_size, start_tracer
from ..util.messages import plural
from .failure_handler import FailureHandler
from .reports import Reports

if TYPE_CHECKING:
    from .api import Options

# hook(watch, model), called when a watch begins.
watch_starts = GlobalHooks()


class Watch:
    """A model being watched, from its construction by `watch` to `stop()`.

    The model computes the same as without it. A Watch keeps no tensor alive and builds no graph. Copies and pickles of
    the model are not watched.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Identity())
        >>> watch = nanwatch.watch(model)
        >>> output = model(torch.tensor([-1.0, 2.0]))
        >>> watch.pause()
        >>> output = model(output)  # not recorded
        >>> watch.resume()
        >>> watch.batch, [frame.name for frame in watch.frames]
        (0, ['0', '1', ''])
        >>> watch.note_loss(output.sum())  # for `spikes=True`
        >>> watch.report().finding is None
        True
        >>> watch.stop()
    """

    def __init__(self, model: nn.Module, options: Options, *, events: EventDispatch | None = None) -> None:
        self._options, self._model = options, weakref.ref(model)
        # Frames of chosen batches come one by one. All others are fetched from a recorder that holds enough.
        takes_all = options.trace is not None and not options.trace_batches
        ring = max(options.max_frames, ring_size(model)) if takes_all else options.max_frames
        self._box = open_box(options.output_dir, options.stall_timeout) if options.black_box else None
        events = events or EventDispatch()
        events.watch = self
        self._recorder = recorder = make_recorder(options.recorder_settings(ring), events)
        # Trace and sinks
        self._tracer = None
        if options.trace is not None:
            self._tracer = start_tracer(options.trace, recorder, ring, options.every)
        targets = [sink_for(target) for target in options.sinks]
        warnings = Warnings(self._tracer.note if self._tracer else lambda _: None)
        self._sinks = sinks = SinkStream(recorder, targets, warnings, every=options.every)
        # Failures
        self._monitor = Monitor(recorder, model, every=options.every, forecasts=options.forecast)
        self._reports = reports = Reports(model, recorder, options, self._monitor.suspicion)
        self._failures = FailureHandler(model, reports, self._monitor, sinks)
        self._steps = self._failures.steps
        self._batch_ends = recorder.subscribe(Event.BATCH_END)
        self._batch_ends.active = sinks.takes_batches or self._tracer is not None or options.spikes
        # Detectors of other faults
        if options.spikes:
            folder, of_ended = options.output_dir, reports.starts.of_ended
            write = (lambda x: write_spike(x, of_ended(x.batch), reports.model(), folder)) if folder else None
            spikes = SpikeWatch(recorder, self._steps, reports.starts.keep, write, sinks.on_spike)
            self._monitor.follow(spikes.take)
            self._steps.spikes = spikes
        timeout = options.peer_timeout or 30.0
        self._replicas: ReplicaWatch | None = None
        if options.replicas:
            recorder.subscribe(Event.BATCH_START)
            tell, num_steps = sinks.on_replica_difference, lambda: reports.num_steps
            self._replicas = ReplicaWatch(model, num_steps, options.replicas, timeout, tell)
        self._audit: UpdateAudit | None = None
        if options.audit is not None:
            every, ranks = options.audit.every, StepRanks(model, timeout)
            self._audit = UpdateAudit(model, recorder, every, sinks.on_update, options.is_frozen, ranks)
        self._attention = AttentionWatch(recorder, options.attention) if options.attention else None
        self._checkpoints = CheckpointGuard(reports, self._failures) if options.guard_checkpoints else None
        self._attachment: Attachment | None = None
        if options.enabled:
            after_step = weakly(self._steps.after_step)
            self._attachment = Attachment(model, recorder, options.observes, reports.excuses, after_step)
            self._failures.excuse_again = weakly(self._attachment.excuse_again)
            watch_starts.call(self, model)

    def __repr__(self) -> str:
        model = self._model()
        name = "a model that is gone" if model is None else type(model).__name__
        batches = plural(self._recorder.latest_batch + 1, "batch", "batches")
        state = "paused" if self._recorder.paused else "watching"
        if self._attachment is None or not self._attachment.is_attached:
            state = "switched off" if self._attachment is None else "stopped"
        return f"<Watch of {name}: {batches}, {state}>"

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None:
                self._look()
                self._failures.ranks.check()
            else:
                self._failures.settle()
                self._failures.ranks.explain(error)
        finally:
            self._leave()

    def stop(self) -> None:
        """Leave the model as it was found; the frames stay. A second time does nothing.

        A trace is whole on disk when this returns, or, with a slow disk, after a warning 10 s later.
        """
        try:
            self._look()
        finally:
            self._leave()

    def _look(self) -> None:
        """Act on what nothing has looked at yet, as the weights since the latest step."""
        self._recorder.settle()
        if sys.exc_info()[1] is None:  # the program's own error says more
            self._steps.act()

    def _leave(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            box.num_watches -= 1
        parts = self._replicas, self._audit, self._steps, self._attachment, self._attention, self._checkpoints
        for part in (*parts, self._steps.spikes):
            if part is not None:
                part.remove()
        if self._tracer is not None:
            self._tracer.close()
        try:
            self._failures.close()
        finally:
            self._sinks.on_close()

    def pause(self) -> None:
        """Record nothing until `resume()`; batches meanwhile are not counted."""
        self._failures.settle()
        self._recorder.paused = True

    def resume(self) -> None:
        """Record again. Does nothing after `stop()`."""
        self._recorder.paused = False

    @property
    def batch(self) -> int | None:
        """The number of the latest batch, counted from 0; None before the first."""
        latest = self._recorder.latest_batch
        return None if latest < 0 else latest

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The latest frames, oldest first, at most `max_frames`. Those of a backward come when it is over."""
        self._failures.settle()
        return tuple(self._recorder.frames()[-self._options.max_frames :])

    @property
    def trace_path(self) -> Path | None:
        """The path of the trace: a folder of parts until `stop()`. None without `trace`."""
        return None if self._tracer is None else self._tracer.writer.path

    @property
    def skipped_steps(self) -> tuple[SkippedStep, ...]:
        """The latest hundred steps that were skipped because gradients were not finite, oldest first."""
        self._failures.settle()
        return tuple(self._steps.skipped)

    @property
    def attention(self) -> dict[str, AttentionLogits]:
        """The latest attention logits by module and head; empty without `attention`. Waits for a GPU."""
        return {} if self._attention is None else self._attention.latest()

    @property
    def spikes(self) -> tuple[SpikeReport, ...]:
        """The latest 16 spikes, oldest first; empty without `spikes`."""
        return () if self._steps.spikes is None else tuple(self._steps.spikes.reports)

    @property
    def replica_differences(self) -> tuple[ReplicaDifference, ...]:
        """The latest 16 differences between replicas, oldest first; empty without `replicas`."""
        return () if self._replicas is None else tuple(self._replicas.differences)

    @property
    def updates(self) -> tuple[UpdateFinding, ...]:
        """Findings about the optimizer's steps, oldest first, at most 64; empty without `audit`."""
        return () if self._audit is None else tuple(self._audit.findings)

    def note_loss(self, loss: Tensor | float) -> None:
        """Take the loss of the batch for `spikes`, before its backward and in its place; does nothing without them.

        A tensor with one loss per sample counts with its mean. A report then names the samples with the largest losses.
        """
        if not isinstance(loss, Tensor | int | float):
            raise TypeError(f"loss should be a tensor or a number, got {type(loss).__name__}")
        if self._steps.spikes is not None and not self._recorder.paused:
            self._steps.spikes.note_loss(loss)

    @property
    def counters(self) -> dict[str, int]:
        """Counts so far: calls, frames, tensors (seen), tensors_read, bytes_read, cache_hits, and of gradients.

        With `gradients`: skipped_steps, and untaken_backwards: non-finite, though the step's gradients were finite.
        """
        self._failures.settle()
        skipped, untaken = self._steps.num_skipped, self._steps.num_untaken
        return {**self._recorder.counters, "skipped_steps": skipped, "untaken_backwards": untaken}

    def report(self) -> Report:
        """Return the report of the latest failure, or of the latest frames when there was none.

        Of several non-finite batches in a row it is the report of the first, because the later ones are its
        consequence.
        """
        return self._failures.report()


class EventDispatch:
    """RecorderEvents of one Watch. docs/architecture.md has the order of the parts at the end of a batch.

    The model's wrappers hold the recorder, the recorder holds this, and this holds the Watch, which so lives as long as
    the model.
    """

    watch: Watch  # which sets it, as the recorder is made with this

    def on_batch_start(
        self, batch: int, traced: bool, module: nn.Module | None, args: tuple[Any, ...], kwargs: Any
    ) -> object:
        """Return what a re-run needs beside the recorder's part of the batch's start.

        Raises PeerNonFiniteError when another rank has failed, unless the run goes on after a failure.
        """
        for part in (self.watch._replicas, self.watch._audit):
            if part is not None:
                part.batch_started(batch, module, args or tuple((kwargs or {}).values()))
        self.watch._failures.ranks.batch_started(batch)
        return self.watch._reports.starts.batch_started(module)

    def on_frame(self, frame: Frame) -> None:
        """Hand the frame to the sinks, and to the trace if its batch was asked for."""
        watch = self.watch
        watch._sinks.on_frame(frame)
        if watch._audit is not None:
            watch._audit.on_frame(frame)
        if watch._tracer is not None:
            watch._tracer.add(frame)

    def on_nonfinite(
        self, frame: Frame, caller: str | None, args: tuple[Any, ...], kwargs: Any, is_over: bool
    ) -> None:
        """Hand the call to the failure handler, which may act on it at once."""
        self.watch._failures.nonfinite_call(frame, caller, args, kwargs, is_over=is_over)

    def on_batch_end(self, batch: int, completed: bool) -> None:
        """Act on the batch's failure where that was put off."""
        watch = self.watch
        if watch._tracer is not None:
            watch._tracer.batch_ended()
        try:
            watch._failures.batch_ended(batch, completed)
        finally:
            watch._sinks.settle(batch)

    def on_backward_start(self) -> None:
        """Find out whether the gradients of the deferred backward are gone, and look at the loss of this one."""
        self.watch._steps.backward_started()

    def on_backward_end(self, calls: list[BackwardCall], arrivals: list[Arrival]) -> None:
        """Defer the failure until a step is about to take it, unless the forward's failure caused it."""
        self.watch._steps.backward_ended(calls, arrivals)
