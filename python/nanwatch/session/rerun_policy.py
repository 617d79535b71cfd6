"""Policy of re-runs: re-runs a failed batch, from the start that the recorder has kept, if it may."""

from __future__ import annotations

import importlib
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..diagnosis import rerun
from ..diagnosis.batch_snapshot import BatchSnapshot, BufferHistory, draws_outside_torch
from ..diagnosis.incident import Incident, write_frames
from ..diagnosis.isolation import ChildEndedError, can_fork, clock, run_in_child
from ..diagnosis.loss_statements import BackwardCall
from ..diagnosis.trials import Conditions
from ..instrumentation.execution_context import RngState
from ..instrumentation.slot import unwatched
from ..recording.events import Event, Recorder, Start
from ..records.record import Record
from ..report.finding import Finding
from ..report.report import Report
from ..util.visible import MANY, is_due, spell, suppressed, warn_user
from .options import Options, scale_of
from .reports import ModelRef

_GOES_ON = "no re-run was made, as the run goes on: rerun=True (--rerun) finds the operation"
# Seconds that each run may take: at least these, and these times the batch's own.
LEAST_SECONDS, TIMES_BATCH = 5.0, 20.0
_NO_MODULE = nn.Module()


class RerunPolicy:
    """Runs a failed batch of `model` again and writes the results, as the options say; see `watch`.

    The recorder keeps the starts of batches, and asks `batch_started` for what Python has of them.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, options: Options) -> None:
        # "warn" and "record" promise a run that goes on without a pause.
        self._may_keep = options.rerun is not False
        acts = options.on_nonfinite == "raise" or callable(options.on_nonfinite)
        self.keeps_start = recorder.keeps_starts = self._may_keep and (options.rerun is True or acts)
        self._recorder = recorder
        # For each batch of a model whose code may draw from random or numpy.random.
        self._entries = recorder.subscribe(Event.BATCH_START)
        self._entries.active = False
        if self.keeps_start:
            recorder.watch_generators(vars(torch.cuda))
        self._output_dir, self._may_fork = options.output_dir, options.rerun_in == "child"
        self._model = ModelRef(model)
        self._num_failures = 0
        self._buffers = BufferHistory()
        self._draws: bool | None = None
        # The start of the batch whose backward has failed, until a step was checked: its graph may be gone. It refers
        # to `_NO_MODULE`, as a model that keeps this would keep itself.
        self._failed: tuple[int, weakref.ref[nn.Module], BatchSnapshot] | None = None
        # By batch, the backward that has failed, until a step was checked.
        self._losses: dict[int, BackwardCall] = {}
        # The CPU's random state at the last step: what a loss draws before it calls the model, it draws from there.
        self._generator: Tensor | None = None
        self._scaler = options.scaler
        # A module that is not watched is not judged either.
        self._allows = lambda name, module: not options.observes(name) or options.excuses(name, module)

    def batch_started(self, module: nn.Module) -> object:
        """Return what the start of a batch has beside the recorder's part."""
        try:
            watched = self._model()
            model = module if watched is None else watched  # a module's truth is its own
            if self._draws is None:
                self._draws = self._entries.active = draws_outside_torch(model)
            buffers = self._buffers.note(model)
            self._recorder.watch_buffers(self._buffers.names())
            return buffers, RngState.capture(others=True).others if self._draws else ()
        except Exception:
            suppressed("the values of buffers could not be kept for a re-run")
            return None

    def find_written(self) -> set[int]:
        """Return the ids of the tensors that this thread's batch was called with and that were written to since."""
        start = self._recorder.start()
        return set() if start is None else {id(x) for x, version in start.versions if x._version != version}

    def let_go(self) -> None:
        """Let go of all that was kept for a backward, as a step takes its gradients."""
        self._recorder.forget_starts()
        self._generator = torch.get_rng_state() if self.keeps_start else None  # 3 µs
        self._losses.clear()
        self._failed = None

    # A backward fails.

    def keep_start(self, batch: int, records: Iterable[Record] = ()) -> None:
        """Keep the start of the batch until a step takes the gradients, also when its graph is gone.

        `records` are those of the backward of its outermost call.
        """
        if (start := self.kept(batch)) is not None:
            sizes = {x.label.removesuffix(".grad"): x.abs_max for x in records if x.isfinite and x.abs_max}
            self._failed = batch, weakref.ref(start.module), replace(start, module=_NO_MODULE, sizes=sizes)

    def backward_failed(self, batch: int, records: Iterable[Record] = ()) -> None:
        """Keep the start of the batch, and the backward under way, until a step takes the gradients."""
        self.keep_start(batch, records)
        # A later call is a part of what lies behind this one's outputs.
        starts = [start for start in self._recorder.ended_starts() if start.batch <= batch]
        failed = next((start for start in starts if start.batch == batch), None)
        if failed is None:
            return
        try:
            calls = [x.nodes for x in starts if not x.is_function]
            since = failed.nodes[1] if failed.is_function else min(end for _, end in calls)
            first = min(starts, key=lambda x: x.batch)
            generators = [x for x in (self._generator, first.generator) if x is not None]
            rngs = [RngState(generator, first.cuda) for generator in generators]
            if (call := BackwardCall.capture(since, calls, rngs)) is not None:
                self._losses[batch] = call
        except Exception:
            suppressed("the statements of the loss could not be kept")

    def kept(self, batch: int) -> BatchSnapshot | None:
        """Return the start of the batch, if it is kept for the batch's backward."""
        starts = [_snapshot(start) for start in self._recorder.ended_starts() if start.batch == batch]
        return next(filter(None, starts), None) or self._start_of_failed(batch)

    def _start_of_failed(self, batch: int) -> BatchSnapshot | None:
        if self._failed is None or self._failed[0] != batch:
            return None
        _, reference, snapshot = self._failed
        module = reference()
        return None if module is None else replace(snapshot, module=module)

    # A failure is examined.

    def examine(self, incident: Incident) -> None:
        """Complete the incident by a re-run of this thread's batch, if it may run again, and write it to output_dir."""
        model, finding = self._model(), incident.finding
        # What wrote a weight before it was saved, or a gradient before a step, lies behind the batch.
        is_of_batch = finding.phase not in ("save", "step")
        if (
            not self.keeps_start
            and self._may_keep
            and is_of_batch
            and finding.origin in ("produced", "received")
        ):
            incident.remark(_GOES_ON)
        if model is None or not (self.keeps_start or self._output_dir is not None):
            return
        self._num_failures += 1
        if not is_due(self._num_failures):
            self._pass_over(incident)
            return
        examines = self.keeps_start and is_of_batch
        start = self._start_of(finding) if examines else None
        loss = self._losses.get(finding.batch) if examines and finding.phase == "backward" else None
        examine = partial(
            rerun.examine,
            incident,
            model=model,
            output_dir=self._output_dir,
            conditions=Conditions(scale_of(self._scaler), self._allows),
            loss=loss,
        )
        try:
            if start is None and loss is None:
                examine(start, examines=examines)
            else:
                self._run_again(incident, model, start, partial(examine, start, examines=True))
        except (Exception, ChildEndedError) as error:  # a failed re-run must not lose the first report
            if isinstance(error, ChildEndedError):
                incident.remark(f"of a re-run in a child process: {error}")
                examine(None, examines=False)
            else:
                warn_user(f"nanwatch could not re-run a failed batch: {spell(error)}", may_raise=False)
        except BaseException as interrupt:  # of a signal's handler, or of code that ran again in this process
            incident.remark(f"{type(interrupt).__name__} ended the re-run")
            examine(None, examines=False)
            raise

    def _run_again(
        self,
        incident: Incident,
        model: nn.Module,
        start: BatchSnapshot | None,
        examine: Callable[..., None],
    ) -> None:
        """Complete the incident in a forked child, else in this process, under a clock."""
        seconds = LEAST_SECONDS + (0.0 if start is None else TIMES_BATCH * start.elapsed)
        # Once, as each child would import it anew: torch._dynamo takes a second.
        importlib.import_module("torch._dynamo")
        tempfile.gettempdir()  # writes a file, the first time

        def work() -> str:
            with clock(seconds):
                examine()
            return incident.report.to_json()

        if self._may_fork and can_fork():
            try:
                incident.report = Report.from_json(run_in_child(work, seconds + LEAST_SECONDS))
            except ChildEndedError as ended:
                if ended.latest is not None:
                    incident.report = Report.from_json(ended.latest)
                raise
            return
        with unwatched(model), clock(seconds):  # no other thread enters the model meanwhile
            is_shared = self._recorder.num_other_threads > 0
            examine(reason="another thread was inside the model" if is_shared else "")

    def _pass_over(self, incident: Incident) -> None:
        """Remark that the batch was not re-run, and warn at the first such failure."""
        rule = f"after {MANY} failures only the {2 * MANY}th, {4 * MANY}th, {8 * MANY}th ... are re-run and written"
        if self._num_failures == MANY + 1:
            cause = "the first report has the cause, Watch.stop() ends them"
            warn_user(f"nanwatch: {rule}; {cause}", may_raise=False)
        incident.remark(f"no re-run was made: this is failure {self._num_failures} of the watch, and {rule}")

    def _start_of(self, finding: Finding) -> BatchSnapshot | None:
        if finding.phase == "backward":
            return self._start_of_failed(finding.batch)
        start = self._recorder.start()
        return None if start is None else _snapshot(start)

    def write_frames(self, report: Report, name: str) -> None:
        """Write a report without a finding as the folder `name` of output_dir, if there is one; never raises."""
        if self._output_dir is None:
            return
        try:
            write_frames(report, self._output_dir / name)
        except Exception as error:
            warn_user(f"nanwatch could not write the last frames: {spell(error)}", may_raise=False)


def _snapshot(start: Start) -> BatchSnapshot | None:
    """Return the start as a re-run takes it; None once its module is gone or it is not kept."""
    if start.module is None:
        return None
    buffers, others = start.extra or ({}, ())
    return BatchSnapshot.of(start, buffers, RngState(start.generator, start.cuda, others))
