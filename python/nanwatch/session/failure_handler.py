"""A failure, from the first non-finite value that is seen to the exception, callback or warning.

Each failure is one Incident, and the methods stand in the order of its life. It is seen: in a call of a forward, in the
calls that a user's exception has left, or in what no forward has made. It is told to the other ranks and the sinks, and
raised inside the forward. Once the forward is left, it is examined by a re-run, written, agreed on with the other ranks
and handed over as the option `on_nonfinite` says.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from ..diagnosis import rerun, search
from ..diagnosis.batch_snapshot import LEAST_SECONDS
from ..diagnosis.incident import Incident, attempt, write_frames
from ..diagnosis.isolation import ChildEndedError, can_fork, run_in_child
from ..history.monitor import Monitor
from ..instrumentation.execution_context import unwatched
from ..instrumentation.global_hooks import weakly
from ..ranks.consensus import RankCoordinator
from ..recording.events import Event
from ..records.record import Frame
from ..report import text
from ..report.report import NonFiniteError, Report, add_note
from ..sinks.sink import SinkStream
from ..util.messages import MANY, first_few, is_due, module_name, spell, suppressing, warn_user
from .kinds import ROOT
from .optimizer_steps import OptimizerSteps, scale_of
from .reports import Reports

# Non-finite batches that are remembered after their end, for their backwards and recomputations.
_MAX_ENDED = 64
# Seconds that a user's exception waits for the other ranks, which look at the store once a second.
_PATIENCE = 3.0
_WHERE = "Watch.report() (or --output-dir) has the frames that led to it"
_GOES_ON = "no re-run was made, as the run goes on: rerun=True (--rerun) finds the operation"
_UNTAKEN = "the watch ended before a step took it"
_ENDS = "the first report has the cause, Watch.stop() ends them"
_RARER = f"after {MANY} failures only the {2 * MANY}th, {4 * MANY}th, {8 * MANY}th ... are re-run and written"


class FailureHandler:
    """Owner of a Watch's incidents.

    A batch has at most one incident, which belongs to the thread that makes the batch. `steps` holds the incident of a
    backward until a step is about to take it. `ranks` knows of the failures of other ranks.
    """

    def __init__(self, model: nn.Module, reports: Reports, monitor: Monitor, sinks: SinkStream) -> None:
        self._reports, self._monitor, self._sinks = reports, monitor, sinks
        self._options, self._recorder = options, recorder = reports.options, reports.recorder
        self._action = options.on_nonfinite
        self._mask: tuple[Any, ...] | None = ()  # batch, shape and counts of the latest mask of scores
        self.excuse_again: Callable[[], object]  # tells the recorder what is allowed
        self._first: Incident | None = None  # of the latest non-finite batches in a row
        self.latest = -sys.maxsize  # batch of such a row
        self._under_way: dict[int, Incident] = {}  # by the numbers of their batches
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)
        self._num_examined = self._num_runs = 0
        self.exception_batch = -1  # the latest one that an exception has ended
        self._warned: Counter[str] = Counter()  # non-finite batches, by the module that was the first to fail
        peer_timeout = options.peer_timeout if self._action == "raise" else 0.0
        self.ranks = RankCoordinator(model, peer_timeout, weakly(self._write_last_frames))
        if peer_timeout and torch.distributed.is_available():
            recorder.watch_name(vars(torch.distributed.distributed_c10d), "_pg_map")  # of process groups
        self._batch_ends = recorder.subscribe(Event.BATCH_END)
        self._batch_ends.active = False
        self.steps = OptimizerSteps(reports, self, sinks.on_skipped_step)  # last, as other threads call it

    # Seen in a forward, and raised there

    def nonfinite_call(
        self, frame: Frame, caller: str | None, args: tuple[Any, ...], kwargs: Any, *, is_over: bool
    ) -> None:
        """Take a call that holds a non-finite value. Act on it at its batch's end if the forward `is_over`."""
        make = partial(self._reports.of_call, frame, caller, args, kwargs)
        if frame.recomputed:
            # A recomputed forward repeats the failure of its batch, or fails first. It is no batch, so nothing ends it.
            if not self.knows(frame.batch):
                self._ended.append(frame.batch)
                self.step_follows(Incident(make()))
            return
        if self._is_mask(frame, make):
            return
        incident = self._see(frame.batch, make)
        may_raise = self._action == "raise" and self._options.act_at != "batch" and not is_over
        if may_raise and incident is not None and incident.raised is None:
            # `batch_ended` acts on it: a re-run could wait for a lock that the forward holds.
            incident.raised = NonFiniteError(incident.report)
            # No local variable holds the error: its traceback would hold this frame, and so the locals of the forward.
            raise incident.raised

    def _is_mask(self, frame: Frame, make: Callable[[], Report]) -> bool:
        """Return whether a line wrote the -inf of this output as a number. If so, allow the module's infinities."""
        fault, options, model, place = frame.fault, self._options, self._reports.model(), ""
        values = None if fault is None else (frame.batch, fault.shape, fault.health)
        if values == self._mask:  # handed on
            return True
        may_look = options.reruns and options.rerun_in == "child" and self._action == "raise" and can_fork()
        if not may_look or not search.may_be_mask(fault) or self.knows(frame.batch):
            return False
        finding = Incident(make()).finding
        start, _ = self._reports.starts.of(finding)
        if model is None or start is None or finding.module != frame.name:
            return False
        with suppressing("an output of -inf could not be looked into"):
            look = partial(search.place_of_mask, start, finding, model=model, allows=self._reports.excuses)
            [place] = run_in_child(look, 2 * start.seconds)
        if place:
            self._mask, entry = values, f"inf:{frame.name or ROOT}"
            self._reports.masks.append(entry)
            self.excuse_again()
            words = f"{place} wrote it as a number, as a mask is: allowed from now on, as by allow={entry!r}"
            warn_user(f"{text.summary(finding)}; {words}", may_raise=False)
        return bool(place)

    def knows(self, batch: int) -> bool:
        """Return whether the batch of this number is known to be non-finite."""
        return batch in self._under_way or batch in self._ended

    def _see(self, batch: int, make: Callable[[], Report], *, tells_ranks: bool = True) -> Incident | None:
        """Return the incident of the batch: None where that has ended, that of `make()` for its first bad call."""
        if not self.knows(batch):
            self.steps.settle(only_known=True)
            # A deferred backward came first: code other than an optimizer has moved the weights by its gradients.
            self._under_way[batch] = incident = self.steps.release() or Incident(make())
            self._batch_ends.active = True
            if tells_ranks:
                self.ranks.publish(incident.finding)  # before anything slow
            self._begin(incident)
            if not self._options.acts:
                self._act(incident)
        return self._under_way.get(batch)

    # The forward is left

    def batch_ended(self, batch: int, completed: bool) -> None:
        """Act on this thread's batch, whose forward has returned (`completed`) or raised.

        The handler completes its own error, and adds a note with the non-finite value to somebody else's. Raises
        PeerNonFiniteError from an error of a collective, when another rank's failure is behind it.
        """
        incident, error = self._under_way.get(batch), None if completed else sys.exc_info()[1]
        is_read = batch % self._options.every == 0
        try:
            if not completed:
                self.exception_batch = batch
                if incident is None:
                    self.ranks.explain(error)
            if incident is not None and self._options.acts and completed == (incident.raised is None):
                self._act(incident)  # not where a forward has caught the error
            elif is_read and isinstance(error, Exception) and not isinstance(error, NonFiniteError):
                with suppressing("a user's exception could not be examined"):  # which matters more
                    self._explain(error, batch)
            elif is_read and completed and incident is None:
                forecast = self._monitor.end(batch)
                self._sinks.batch_ended(batch)
                if forecast is not None:
                    self._sinks.on_forecast(batch, forecast)
        finally:
            if (incident := self._under_way.pop(batch, None)) is not None:
                incident.raised = None  # its traceback holds the batch
                self._ended.append(batch)
            self._batch_ends.active = bool(self._under_way)

    def _explain(self, error: Exception, batch: int) -> None:
        """Add the report of the batch to a user's exception, if a call that it left holds a non-finite value."""
        incident = self._under_way.get(batch)
        if incident is None and (report := self._reports.of_left_calls(error, batch)) is not None:
            # The other ranks are not told, as somebody may catch the exception.
            incident = self._see(batch, lambda: report, tells_ranks=False)
        if incident is None:
            return
        if self._options.acts:
            self._complete(incident, _PATIENCE)
        add_note(error, incident.report)  # and raise nothing beside it
        if callable(self._action):
            self._action(incident.report)

    # Seen where no forward is under way

    def step_follows(self, incident: Incident) -> None:
        """Act on a failure whose batch has no end to wait for: a gradient, a weight after a step, a checkpoint."""
        self.ranks.is_sharded = self._recorder.gathers_weights
        self.ranks.publish(incident.finding)
        self._begin(incident)
        self._act(incident)

    # Told, examined, agreed on, handed over

    def _begin(self, incident: Incident) -> None:
        # A bad checkpoint is no batch, so the next bad one begins a row of its own.
        is_next = incident.finding.batch <= self.latest + self._options.every
        if self._first is None or self._first.finding.phase == "save" or not is_next:
            self._first = incident
        self.latest = self._recorder.latest_batch
        self._sinks.on_nonfinite(incident.finding)

    def _complete(self, incident: Incident, patience: float = inf) -> None:
        """Have an incident examined and written, agree with the other ranks on the origin, and tell the sinks.

        Only the first of several non-finite batches in a row is examined, unless each is raised, and sinks get only
        that where the run goes on by itself.
        """
        is_first = self._first is incident
        if is_first or self._action == "raise":
            self._examine(incident)
        if (origin := self.ranks.settle(patience)) is not None:
            incident.report = replace(incident.report, origin=origin)
        if is_first or self._options.acts:
            self._sinks.on_failure(incident.report)

    def _examine(self, incident: Incident) -> None:
        """Complete the incident by a re-run of this thread's batch, if it may run again, and write it to output_dir."""
        options, finding, model = self._options, incident.finding, self._reports.model()
        is_of_batch = finding.phase not in ("save", "step")  # what wrote there lies behind the batch
        goes_on = options.rerun is None and not options.acts
        if goes_on and is_of_batch and finding.origin in ("produced", "received"):
            incident.remark(_GOES_ON)
        if model is None or not (options.reruns or options.output_dir is not None):
            return
        self._num_examined = number = self._num_examined + 1
        if not is_due(number):
            if number == MANY + 1:
                warn_user(f"nanwatch: {_RARER}; {_ENDS}", may_raise=False)
            incident.remark(f"no re-run was made: this is failure {number} of the watch, and {_RARER}")
            return
        start, call = self._reports.starts.of(finding)
        facts: Any = {"call": call, "allows": self._reports.excuses, "loss_scale": scale_of(options.scaler)}
        examine: Any = partial(rerun.examine, incident, model=model, output_dir=options.output_dir, **facts)
        examines = options.reruns and is_of_batch
        is_of_step = options.reruns and (finding.phase, finding.origin) == ("step", "weight")

        def in_child() -> str:
            examine(start, examines=examines)
            return incident.report.to_json()

        try:
            if not is_of_step and (not examines or (start is None and call is None)):
                examine(None, examines=examines)
            elif options.rerun_in == "child" and can_fork():
                seconds = LEAST_SECONDS if start is None else start.seconds
                for document in run_in_child(in_child, 2 * seconds):
                    incident.report = Report.from_json(document)
            else:
                with unwatched(model):  # no other thread enters the model meanwhile
                    reason = "another thread was inside the model" if self._recorder.num_other_threads else ""
                    examine(start, examines=examines, reason=reason)
        except BaseException as error:
            words = error if isinstance(error, ChildEndedError) else spell(error)
            incident.remark(f"nanwatch could not re-run a failed batch: {words}")
            with suppressing("a failure could not be written"):  # the first report survives a failed re-run
                examine(None, examines=False)
            if not isinstance(error, Exception):
                # By a signal handler of the program, or by code that ran again in this process.
                cause = NonFiniteError(incident.report)
                warn_user(f"{cause}", may_raise=False)
                raise error from cause

    def _act(self, incident: Incident) -> None:
        """Complete an incident, and hand it over, once."""
        self._complete(incident)
        report = incident.report
        if incident.raised is not None:
            # A second error would lose the notes that code in the forward has added to the first.
            NonFiniteError.__init__(incident.raised, report, report.origin)
        elif self._action == "raise":
            raise NonFiniteError(report, report.origin)
        elif self._action == "warn" and incident.finding.phase != "save" and self._begins_run(incident):
            warn_user(f"{text.summary(incident.finding)}; {_WHERE}")  # the guard warns of a checkpoint
        elif callable(self._action):
            self._action(report)

    def _begins_run(self, incident: Incident) -> bool:
        """Count the batch for the sum at the end. Return whether it begins the 1st, 2nd, 4th, 8th row of failures."""
        begins = self._first is incident
        self._num_runs += begins
        self._warned[incident.finding.module] += 1
        return begins and self._num_runs.bit_count() == 1

    # Another rank fails

    def _write_last_frames(self, name: str) -> Report:
        """Write and return the latest frames of a rank without a failure of its own, from any thread."""
        report, folder = self._reports.latest(), self._options.output_dir
        if folder is not None:
            warn = partial(warn_user, may_raise=False)
            attempt("nanwatch: writing the last frames", partial(write_frames, report, folder / name), warn)
        return report

    # A report is asked for

    def report(self) -> Report:
        """Return the report of the first of the latest non-finite batches in a row, else of the latest frames."""
        self.settle()
        deferred = self.steps.deferred
        incident = self._first or (self.steps.look() if deferred is None else deferred.incident)
        return self._reports.latest() if incident is None else incident.report

    def settle(self) -> None:
        """Settle what is under way before a report is made. A failure becomes a warning, as a report raises nothing."""
        try:
            self._recorder.settle()
        except NonFiniteError as error:  # the failure of a thread or a backward that an exception has ended
            warn_user(f"{error}", may_raise=False)
        self.steps.settle()

    # The watch ends

    def close(self) -> None:
        """Warn of a bad backward that no step took and of the number of all failures, and leave the other ranks.

        Such a backward is no failure yet, so "raise" warns too.
        """
        reason = "on_nonfinite raised while the watch ended by another error"
        try:
            with suppressing(reason) if sys.exc_info()[0] is not None else nullcontext():
                if (deferred := self.steps.release()) is not None:
                    deferred.remark(_UNTAKEN)
                    self._begin(deferred)
                    self._complete(deferred)
                    if self._action in ("raise", "warn"):
                        sentence = f"{text.summary(deferred.finding)}; {_UNTAKEN}; {_WHERE}"
                        warn_user(sentence, may_raise=sys.exc_info()[0] is None)
                    elif callable(self._action):
                        self._action(deferred.report)
        finally:
            self._reports.starts.let_go()
            self.ranks.close()
            counts, self._warned = self._warned, Counter()
            if counts:
                names = [f"{repr(x) if x else module_name(x)} {n:,}x" for x, n in counts.most_common()]
                total = f"{counts.total():,} of {self._recorder.latest_batch + 1:,}"
                words = f"non-finite batches: {total}, first in {first_few(names, 3)}"
                warn_user(words, may_raise=sys.exc_info()[0] is None)
