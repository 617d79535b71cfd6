"""A failure, from the first non-finite value that is seen to the exception, callback or warning.

Each failure is one Incident. FailureHandler takes it from top to bottom: seen, told to the other ranks and the sinks,
raised inside the forward, and once that is left examined, written, agreed on and handed over. The option
`on_nonfinite` says how it is handed over.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..diagnosis.incident import Incident
from ..history.monitor import Monitor
from ..ranks.coordinator import RankCoordinator
from ..recording.events import Event
from ..records.record import Frame
from ..report import text
from ..report.report import BatchLimitError, NonFiniteError, Report, add_note, report_of
from ..sinks.sink import SinkStream
from ..util.visible import first_few, module_name, suppressed, suppressing, warn_user
from .reports import Reports

if TYPE_CHECKING:
    from .rerun_policy import RerunPolicy

# Non-finite batches that are remembered after their end, for their backwards and recomputations.
_MAX_ENDED = 64
_WHERE = "Watch.report() (or --output-dir) has the frames that led to it"


class FailureHandler:
    """Owner of a Watch's incidents.

    A batch has at most one incident, which belongs to the thread that makes the batch. `steps`, which the Watch sets,
    holds the incident of a backward until a step is about to take it.
    """

    steps: Any  # OptimizerSteps, which imports this module

    def __init__(self, reports: Reports, monitor: Monitor, sinks: SinkStream, rerun: RerunPolicy) -> None:
        self._reports = reports
        self._options = options = reports.options
        self._action = options.on_nonfinite
        # True if the user gets the report of each failure. Otherwise the run goes on by itself.
        self._acts = self._action == "raise" or callable(self._action)
        self._recorder = recorder = reports.recorder
        self._monitor = monitor
        self._sinks = sinks
        self.rerun = rerun
        # The first incident of the latest run of non-finite batches. A finite batch ends the run.
        self._first: Incident | None = None
        self.is_run_open = False
        self._num_runs = 0
        self._warned: Counter[str] = Counter()  # non-finite batches, by the module that was the first to fail
        self._latest_warned = -sys.maxsize
        self._under_way: dict[int, Incident] = {}  # by the numbers of their batches
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)
        self._exception_batch: int | None = None
        self._ranks: RankCoordinator | None = None
        if (model := reports.model()) is not None and self._action == "raise" and options.peer_timeout:
            # Not a bound method: the job would keep this handler alive.
            handler = weakref.ref(self)
            self._ranks = RankCoordinator(
                model,
                options.peer_timeout,
                lambda name: report_of(()) if (live := handler()) is None else live._write_last_frames(name),
            )
            if torch.distributed.is_available():
                recorder.watch_name(vars(torch.distributed.distributed_c10d), "_pg_map")  # of process groups
        reports.find_written = rerun.find_written
        self._batch_ends = recorder.subscribe(Event.BATCH_END)
        self._batch_ends.active = False

    # A batch begins

    def batch_started(self, batch: int, module: nn.Module | None) -> object:
        """Return what a re-run needs beside the recorder's part; see RerunPolicy.

        Raises PeerNonFiniteError when another rank has failed, unless the run goes on after a failure.
        """
        if self._ranks is not None:
            self._ranks.batch_started(batch)
            self._batch_ends.active = True
        return self.rerun.batch_started(module) if self.rerun.keeps_start and module is not None else None

    # Seen, and raised inside the forward

    def nonfinite_call(
        self, frame: Frame, caller: str | None, args: tuple[Any, ...], kwargs: Any, *, is_over: bool
    ) -> None:
        """Take a call that holds a non-finite value. Act on it at its batch's end if the forward `is_over`."""

        def make() -> Report:
            calls = self._reports.calls_around(frame.name, frame.batch)
            if not is_over:  # this thread is inside the call
                calls = self._reports.calls_to(frame.name, caller, args, kwargs)
            return self._reports.of_failure(frame, caller, args, kwargs, calls)

        if frame.recomputed:
            # A recomputed forward repeats the failure of its batch, or is the first to fail. It has no end of its own.
            if not self.knows(frame.batch):
                self._ended.append(frame.batch)
                self.step_follows(Incident(make()))
            return
        incident = self._see(frame.batch, make)
        if incident is None or incident.is_finished or incident.raised is not None:
            return
        if self._action == "raise" and self._options.act_at != "batch" and not is_over:
            # `forward_left` finishes it: a re-run could wait for a lock that the forward holds.
            incident.raised = NonFiniteError(incident.report)
            # Raise it from no local: the traceback would hold itself, and with it the locals of the forward.
            raise incident.raised

    def _see(self, batch: int, make: Callable[[], Report], *, tells_ranks: bool = True) -> Incident | None:
        """Return the incident of the batch: None where that has ended, that of `make()` for its first bad call."""
        if self.knows(batch):
            return self._under_way.get(batch)
        self.steps.settle(only_known=True)
        # A deferred backward came first: something else than an optimizer has moved the weights by its gradients.
        self._under_way[batch] = incident = self.steps.release() or Incident(make())
        begins = self._tell(incident, ranks=tells_ranks)
        if not self._acts:
            self._finish(incident)
        self._warn(incident, begins)
        return incident

    def step_follows(self, incident: Incident) -> None:
        """Take a failure whose batch has no end to wait for, and act on it.

        It is a non-finite gradient that a step is about to take, a weight after a step, or a checkpoint.
        """
        if self._ranks is not None:
            self._ranks.is_sharded = self._recorder.gathers_weights
        begins = self._tell(incident)
        self._finish(incident)
        if incident.finding.phase != "save":  # no batch; its guard warns
            self._warn(incident, begins)

    def knows(self, batch: int) -> bool:
        """Return whether the batch of this number is known to be non-finite."""
        return batch in self._under_way or batch in self._ended

    # Told

    def _tell(self, incident: Incident, *, ranks: bool = True) -> bool:
        """Tell the other ranks, before anything slow, and the sinks. Return whether a run of failures begins."""
        begins = not self.is_run_open
        if begins:
            self._first, self.is_run_open = incident, True
        self._batch_ends.active = True
        if ranks and self._ranks is not None:
            self._ranks.publish(incident.finding)
        self._sinks.on_nonfinite(incident.finding)
        return begins

    def _warn(self, incident: Incident, begins: bool) -> None:
        """Count the batch for the sum at the end, and warn of the 1st, 2nd, 4th, 8th run of failures."""
        if self._action != "warn":
            return
        # A backward fails after its forward, which has been finite and has ended the run of the backward before.
        batch, latest = incident.finding.batch, self._latest_warned
        begins, self._latest_warned = begins and batch > latest + self._options.every, batch
        self._warned[incident.finding.module] += 1
        self._num_runs += begins
        if begins and self._num_runs.bit_count() == 1:
            warn_user(f"{text.summary(incident.finding)}; {_WHERE}")

    # The forward is left, and the batch ends

    def forward_left(self, batch: int, completed: bool) -> None:
        """Take the end of this thread's forward, which has returned (`completed`) or raised.

        Raises PeerNonFiniteError from an error of a collective, when another rank's failure is behind it.
        """
        if completed:
            return
        error, incident = sys.exc_info()[1], self._under_way.get(batch)
        if incident is not None and incident.raised is not None:
            self._finish(incident, incident.raised)
        else:
            self._explain(error)
        self._exception_batch = batch
        is_known = isinstance(error, NonFiniteError | BatchLimitError)
        if isinstance(error, Exception) and not is_known and batch % self._options.every == 0:
            with suppressing("what an exception of the user's left could not be told"):  # which matters more
                self._annotate(error, batch)

    def _annotate(self, error: Exception, batch: int) -> None:
        """Add a note with the non-finite value to somebody else's exception that ends the batch."""
        incident = self._under_way.get(batch)
        if incident is None:
            report = self._reports.of_left_calls(error, batch)
            if report is None or report.finding is None:
                return
            # Somebody may catch the exception and go on, so the other ranks are not told.
            incident = self._see(batch, lambda: report, tells_ranks=False)
        if incident is not None and not incident.is_finished:
            self._finish(incident, error, agrees=self._action != "raise")
        elif incident is not None and not self._acts:
            add_note(error, incident.report)

    def conclude(self, batch: int, completed: bool) -> None:
        """Act on a batch that has ended and whose frames are all known, unless its forward was ended by its error."""
        try:
            if (incident := self._under_way.get(batch)) is not None:
                # A forward may have caught the error.
                if completed and self._acts and incident.raised is None:
                    self._finish(incident)
            elif completed and batch % self._options.every == 0:
                self.is_run_open = False
                forecast = self._monitor.end(batch)
                self._sinks.batch_ended(batch)
                if forecast is not None:
                    self._sinks.on_forecast(batch, forecast)
        finally:
            if (incident := self._under_way.pop(batch, None)) is not None:
                incident.raised = None  # its traceback holds the batch
                self._ended.append(batch)
            self._batch_ends.active = bool(self._under_way) or self.is_run_open

    # Examined, written, agreed on, handed over

    def _finish(
        self,
        incident: Incident,
        error: BaseException | None = None,
        *,
        agrees: bool = True,
        raises: bool = True,
    ) -> None:
        """Have the incident examined and written, agree with the other ranks on the origin, and raise it; once.

        `error` is an exception that ends the batch already: it gets the report, and nothing is raised beside it. Of
        several non-finite batches in a row only the first is examined, unless each is raised, and the sinks get only
        the first where the run goes on by itself.
        """
        if incident.is_finished:
            return
        incident.is_finished = True
        is_first = self._first is incident
        if is_first or self._action == "raise":
            try:
                self.rerun.examine(incident)
            except BaseException as interrupt:  # what a signal handler of the program raised meanwhile
                cause = NonFiniteError(incident.report)
                warn_user(f"{cause}", may_raise=False)
                raise interrupt from cause
        if agrees and self._ranks is not None and (origin := self._ranks.settle()) is not None:
            incident.report = replace(incident.report, origin=origin)
        report = incident.report
        if is_first or self._acts:
            self._sinks.on_failure(report)
        if error is not None and error is incident.raised:
            # A second error would lose the notes that code in the forward has added to the first.
            NonFiniteError.__init__(incident.raised, report, report.origin)
        elif error is not None:
            add_note(error, report)
        elif raises and self._action == "raise":
            raise NonFiniteError(report, report.origin)
        if callable(self._action):
            self._action(report)

    # Another rank fails

    def _explain(self, error: BaseException | None) -> None:
        """Raise PeerNonFiniteError from `error` when another rank's failure is behind it."""
        if self._ranks is not None and (explained := self._ranks.explain(error)) is not None:
            raise explained from error

    def await_ranks(self) -> None:
        """Wait until every rank begins this step, where each has a part of the model.

        Raises PeerNonFiniteError when one of them does not take it.
        """
        if self._ranks is not None and self._recorder.gathers_weights:
            self._ranks.is_sharded = True
            self._ranks.await_step()

    def _write_last_frames(self, name: str) -> Report:
        """Write and return the latest frames of a rank without a failure of its own, from any thread."""
        report = self._reports.latest(None, self._reports.batch)
        self.rerun.write_frames(report, name)
        return report

    # A report is asked for

    @property
    def failure(self) -> Report | None:
        """The report of the first failure of the latest run of non-finite batches, else of the deferred backward."""
        incident = self._first or self.steps.deferred
        return None if incident is None else incident.report

    @property
    def ended_by_exception(self) -> bool:
        """True if the latest batch ended by an exception."""
        return self._exception_batch is not None and self._exception_batch == self._recorder.latest_batch

    def settle(self) -> None:
        """Settle the recorder where a report is asked for, which is no place to raise an error."""
        try:
            self._recorder.settle()
        except NonFiniteError as error:  # of a thread or a backward that an exception has ended
            warn_user(f"{error}", may_raise=False)

    # The watch ends

    def run_ended(self, error: BaseException | None) -> None:
        """Take the end of a `with` block. Raises PeerNonFiniteError as `batch_started` does."""
        if error is not None:
            self.settle()
            self._explain(error)
        elif self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        """Report gradients that no step was about to take, warn of the sum of all failures, and leave the other ranks.

        Such gradients are no failure yet, so "raise" warns too.
        """
        is_raising = sys.exc_info()[0] is not None
        try:
            if (deferred := self.steps.release()) is not None:
                self._report_untaken(deferred, is_raising)
        finally:
            self.rerun.let_go()
            if self._ranks is not None:
                self._ranks.close()
            counts, self._warned = self._warned.most_common(), Counter()
            if counts:
                names = [f"{repr(name) if name else module_name(name)} {count:,}x" for name, count in counts]
                total, num_batches = sum(count for _, count in counts), self._recorder.latest_batch + 1
                words = f"non-finite batches: {total:,} of {num_batches:,}, first in {first_few(names, 3)}"
                warn_user(words, may_raise=sys.exc_info()[0] is None)

    def _report_untaken(self, deferred: Incident, is_raising: bool) -> None:
        deferred.remark("the watch ended before a step took it")
        self._tell(deferred, ranks=False)
        try:
            self._finish(deferred, agrees=False, raises=False)
        except Exception:
            if not is_raising:
                raise
            suppressed("on_nonfinite raised while the watch ended by another error")
        if self._action in ("raise", "warn"):
            words = f"{text.summary(deferred.finding)}; the watch ended before a step took it; {_WHERE}"
            warn_user(words, may_raise=not is_raising)
