"""Policy of re-runs: keeps the start of each thread's batch until its end, and re-runs a failed one if it may."""

from __future__ import annotations

import importlib
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import nn

from ..diagnosis import folder, rerun
from ..diagnosis.backward_rerun import read_graph
from ..diagnosis.batch_snapshot import BatchSnapshot, draws_outside_torch
from ..diagnosis.child_process import ChildEndedError, NoChildError, run_in_child, why_no_child
from ..diagnosis.experiment import Conditions
from ..diagnosis.in_process import clock
from ..diagnosis.incident import Incident
from ..diagnosis.loss_statements import BackwardCall
from ..diagnosis.module_state import BufferHistory
from ..instrumentation.functions import Function
from ..report.finding import Finding
from ..report.report import Report
from ..util.throttle import MANY, is_due
from ..util.visible import spell, suppressed, warn_user
from .options import Options
from .reports import ModelRef

_GOES_ON = "no re-run was made, as the run goes on: rerun=True (--rerun) finds the operation"
# Seconds that a re-run waits for other threads to leave the model. They may wait for this one.
_PATIENCE = 1.0
# Seconds that each run may take: at least these, and these times the batch's own.
LEAST_SECONDS, TIMES_BATCH = 5.0, 20.0


class _Graph:
    """Stand-in for the graph of a batch. The recorder holds it until no gradient of the batch can come any more."""

    __slots__ = ("__weakref__",)


_NO_MODULE = nn.Module()


@dataclass(slots=True)
class _Forward:
    """A forward since the latest step.

    `begin` and `end` are autograd's sequence numbers: of its first node, and of the first behind it. `snapshot` is kept
    for the backward, until the next batch begins. It refers to `_NO_MODULE`: a model that keeps its output keeps the
    graph, and so would keep itself, in a cycle that the garbage collector does not see. `is_loss`: of a watched
    function, which is a part of the loss.
    """

    batch: int
    module: weakref.ref[nn.Module]
    snapshot: BatchSnapshot | None
    begin: int
    end: int
    is_loss: bool

    def start(self) -> BatchSnapshot | None:
        """Return the start of the batch, or None once its module is gone."""
        module = self.module()
        return None if module is None or self.snapshot is None else replace(self.snapshot, module=module)


class RerunPolicy:
    """Runs a failed batch of `model` again and writes the results, as the options say; see `watch`.

    `keeps_start` says whether `batch_started` and `batch_ended` are to be called.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        # "warn" and "record" promise a run that goes on without a pause.
        self._may_keep = options.rerun is not False
        acts = options.on_nonfinite == "raise" or callable(options.on_nonfinite)
        self.keeps_start = self._may_keep and (options.rerun is True or acts)
        self._output_dir = options.output_dir
        self._model = ModelRef(model)
        self._num_failures = 0
        self._buffers = BufferHistory()
        # Whether the model's code may draw from random or numpy.random.
        self._draws: bool | None = None
        # Held while a thread enters or leaves the model, and during a re-run in this process.
        self._door = threading.Condition()
        # By thread, from the start of its batch to its end. The snapshot is None where no re-run is possible.
        self._starts: dict[int, tuple[BatchSnapshot | None, weakref.ref[_Graph], int]] = {}
        self._forwards: weakref.WeakKeyDictionary[_Graph, _Forward] = weakref.WeakKeyDictionary()
        # The forward whose backward has failed, until a step was checked: its graph may be gone.
        self._failed: _Forward | None = None
        # By batch, the backward that has failed, until a step was checked.
        self._losses: dict[int, BackwardCall] = {}
        self._keeps_ended = options.gradients
        self._scaler = options.scaler
        # A module that is not watched is not judged either.
        self._allows = lambda name, module: not options.observes(name) or options.excuses(name, module)

    # A batch begins and ends.

    def batch_started(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> object:
        """Keep what a re-run of this thread's batch would need.

        Return an object for the recorder to hold until no gradient of the batch can come any more.
        """
        try:
            model = self._model()
            model = module if model is None else model
            if self._draws is None:
                self._draws = draws_outside_torch(model)
            buffers = self._buffers.note(model)
            start = BatchSnapshot.capture(module, args, kwargs, buffers=buffers, draws=self._draws)
        except Exception:
            suppressed("the start of a batch could not be kept, so it has no re-run")
            start = None
        graph = _Graph()
        with self._door:
            if not isinstance(module, Function):  # a loss after the model's call, before the backward of both
                self._let_go_of_start()
            sequence = torch._C._autograd._get_sequence_nr()
            self._starts[threading.get_ident()] = start, weakref.ref(graph), sequence
        return graph

    def batch_ended(self, batch: int) -> None:
        """Let go of the start of this thread's batch, or keep it for the batch's backward."""
        with self._door:
            start, graph_ref, begin = self._starts.pop(threading.get_ident(), (None, None, 0))
            self._door.notify_all()
            graph = None if graph_ref is None else graph_ref()
            if self._keeps_ended and start is not None and start.grad and graph is not None:
                self._forwards[graph] = _Forward(
                    batch,
                    weakref.ref(start.module),
                    replace(start, module=_NO_MODULE),
                    begin,
                    torch._C._autograd._get_sequence_nr(),
                    isinstance(start.module, Function),
                )

    def let_go(self) -> None:
        """Let go of all that was kept for a backward."""
        with self._door:
            self._forwards.clear()
            self._let_go_of_start()

    def _let_go_of_start(self) -> None:
        for forward in list(self._forwards.values()):
            forward.snapshot = None
        self._losses.clear()
        self._failed = None

    # A backward fails.

    def behind_model(self, finding: Finding) -> Finding:
        """Return the finding of a backward under way with what the graph tells, if its loss made the value.

        Keep the backward, whose loss may run again.
        """
        with self._door:
            forwards = list(self._forwards.values())
        failed = next((forward for forward in forwards if forward.batch == finding.batch), None)
        if failed is None:
            return finding
        try:
            # A later call is a part of what lies behind this one's outputs.
            calls = [(x.begin, x.end) for x in forwards if x.batch <= failed.batch and not x.is_loss]
            since = failed.end if failed.is_loss else min(end for _, end in calls)
            call = BackwardCall.capture(since, calls)
            if call is None:
                return finding
            self._losses[finding.batch] = call
            return read_graph(finding, call) if finding.is_of_loss else finding
        except Exception:
            suppressed("the graph of the loss could not be read")
            return finding

    def backward_failed(self, batch: int) -> None:
        """Keep the start of the batch also when its graph is gone, until a step takes the gradients."""
        with self._door:
            kept = [x for x in self._forwards.values() if x.batch == batch and x.snapshot is not None]
            if kept:
                self._failed = replace(kept[0])

    def kept(self, batch: int) -> BatchSnapshot | None:
        """Return the start of the batch, if it is kept for the batch's backward."""
        with self._door:
            forwards = [*self._forwards.values(), *filter(None, [self._failed])]
        starts = (forward.start() for forward in forwards if forward.batch == batch)
        return next((start for start in starts if start is not None), None)

    # A failure is examined.

    def examine(self, incident: Incident) -> None:
        """Complete the incident by a re-run of this thread's batch, if it may run again, and write it to output_dir."""
        model, finding = self._model(), incident.finding
        if not self.keeps_start and self._may_keep and finding.origin in ("produced", "received"):
            incident.remark(_GOES_ON)
        if model is None or not (self.keeps_start or self._output_dir is not None):
            return
        self._num_failures += 1
        if not is_due(self._num_failures):
            self._pass_over(incident)
            return
        # What wrote a weight before it was saved, or a gradient before a step, lies behind the batch.
        examines = self.keeps_start and finding.phase not in ("save", "step")
        start = self._start_of(finding) if examines else None
        examine = partial(
            rerun.examine,
            incident,
            model=model,
            output_dir=self._output_dir,
            conditions=Conditions(self._loss_scale(), self._allows, self._keeps_ended),
            loss=self._losses.get(finding.batch) if examines and finding.phase == "backward" else None,
        )
        try:
            if start is None and examine.keywords["loss"] is None:
                examine(start, examines=examines)
            else:
                self._run_again(incident, start, partial(examine, start, examines=True))
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
        self, incident: Incident, start: BatchSnapshot | None, examine: Callable[..., None]
    ) -> None:
        """Complete the incident in a forked child, else in this process, under a clock."""
        seconds = LEAST_SECONDS + (0.0 if start is None else TIMES_BATCH * (time.monotonic() - start.began))
        # Once, as each child would import it anew: torch._dynamo takes a second.
        importlib.import_module("torch._dynamo")
        tempfile.gettempdir()  # writes a file, the first time

        def work() -> str:
            with clock(seconds):
                examine()
            return incident.report.to_json()

        if not why_no_child():
            with suppress(NoChildError):
                try:
                    incident.report = Report.from_json(run_in_child(work, seconds + LEAST_SECONDS))
                except ChildEndedError as ended:
                    if ended.latest is not None:
                        incident.report = Report.from_json(ended.latest)
                    raise
                return
        here = threading.get_ident()
        with self._door:  # no other thread enters the model meanwhile
            is_alone = self._door.wait_for(lambda: self._starts.keys() <= {here}, _PATIENCE)
            with clock(seconds):
                examine(reason="" if is_alone else "another thread was inside the model")

    def _pass_over(self, incident: Incident) -> None:
        """Remark that the batch was not re-run."""
        if self._num_failures == MANY + 1:
            warn_user(
                f"nanwatch has re-run {MANY} failed batches of this model. From now on it does so only at the"
                f" {2 * MANY}th, {4 * MANY}th, {8 * MANY}th and so on. To end the failures, follow the first report."
                " To have no more reports, call Watch.stop(). To have one of each failure, begin a new watch.",
                may_raise=False,
            )
        incident.remark(
            f"no re-run was made, and nothing was written: it is failure {self._num_failures} of this"
            f" watch, and after {MANY} only the {2 * MANY}th, {4 * MANY}th, {8 * MANY}th ... are re-run"
        )

    def _loss_scale(self) -> float | None:
        """Return the present scale of the loss, if the user named the GradScaler.

        A scaler that is found in the process may have no part in this batch.
        """
        try:
            scale = None if self._scaler is None else float(self._scaler.get_scale())
        except Exception:
            suppressed("a GradScaler of another make did not tell its scale")
            return None
        return scale if scale and isfinite(scale) else None

    def _start_of(self, finding: Finding) -> BatchSnapshot | None:
        if finding.phase == "backward":
            failed = self._failed
            return failed.start() if failed is not None and failed.batch == finding.batch else None
        return self._starts.get(threading.get_ident(), (None,))[0]

    def write_frames(self, report: Report, name: str) -> None:
        """Write a report without a finding as the folder `name` of output_dir, if there is one; never raises."""
        if self._output_dir is None:
            return
        try:
            folder.write_frames(report, self._output_dir / name)
        except Exception as error:
            warn_user(f"nanwatch could not write the last frames: {spell(error)}", may_raise=False)
