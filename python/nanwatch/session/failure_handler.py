"""Handling of non-finite values: report them, tell the other ranks, ask for the re-run, and act once.

The EventDispatch notifies the handler. The option `on_nonfinite` says what the handler does at the end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..diagnosis.batch_snapshot import left_calls
from ..monitoring.monitor import Monitor
from ..recording.events import Event
from ..recording.observe import observe
from ..recording.walk import call_leaves
from ..records.record import Frame
from ..report import text
from ..report.finding import Finding
from ..report.report import BatchLimitError, NonFiniteError, Report, add_note, report_of
from ..util.visible import suppressed, warn_user
from .optimizer_guard import OptimizerGuard
from .rank_agreement import RankAgreement
from .reports import NonFiniteBatch, NonFiniteBatches, NonFiniteWarnings, Reports

if TYPE_CHECKING:
    from .rerun_policy import RerunPolicy


class FailureHandler:
    """Owner of a Watch's failures, from the first non-finite value of a batch to the exception, callback or warning.

    `guard` holds the failure of a backward until a step is about to take it; None without `gradients`.
    """

    def __init__(
        self, reports: Reports, monitor: Monitor, rerun: RerunPolicy, guard: OptimizerGuard | None
    ) -> None:
        self._reports = reports
        self._options = options = reports.options
        self._action = options.on_nonfinite
        self._recorder = recorder = reports.recorder
        self._monitor = monitor
        self.rerun = rerun
        self._guard = guard
        self.batches = NonFiniteBatches()
        # A backward fails when its batch has ended: with gradients one finite batch says nothing of its own.
        self._warnings = NonFiniteWarnings(
            speaks=self._action == "warn", patience=2 if options.gradients else 1
        )
        self._exception_batch: int | None = None
        # An error that was found while a report was asked for, which is no place to raise it.
        self._postponed: NonFiniteError | None = None
        # Not a bound method: the job would keep this alive.
        this = weakref.ref(self)
        self._ranks = RankAgreement(
            reports.model(),
            options,
            lambda name: report_of(()) if (own := this()) is None else own._write_last_frames(name),
        )
        self._takes_starts = rerun.keeps_start or self._ranks.is_active
        self._batch_starts = recorder.subscribe(Event.BATCH_START)
        self._batch_starts.active = self._takes_starts
        self._batch_ends = recorder.subscribe(Event.BATCH_END)
        self._update_subscription()

    def _update_subscription(self) -> None:
        """Subscribe to the ends of batches while a kept start, a non-finite batch or a warning waits for one."""
        self._batch_ends.active = self._takes_starts or bool(self.batches) or self._warnings.awaits_batches

    def poll(self, *, wait: bool) -> None:
        """Poll the recorder. Postpone an error to the next batch, optimizer's step or `Watch.look()`."""
        try:
            self._recorder.poll(wait)
        except NonFiniteError as error:
            self._postponed = error
            self._batch_starts.active = True

    def raise_postponed(self) -> None:
        """Raise the error that `poll` has postponed, if any."""
        error, self._postponed = self._postponed, None
        if error is not None:
            self._batch_starts.active = self._takes_starts
            raise error

    @property
    def ended_by_exception(self) -> bool:
        """True if the latest batch ended by an exception."""
        return self._exception_batch is not None and self._exception_batch == self._recorder.latest_batch

    def batch_started(
        self, batch: int, module: nn.Module | None, args: tuple[Any, ...], kwargs: Any
    ) -> object:
        """Keep what a re-run would need, and return what the recorder is to hold; see RerunPolicy.

        Raises PeerNonFiniteError when another rank has failed, unless the run goes on after a failure.
        """
        self._ranks.batch_started(batch)
        if not self.rerun.keeps_start or module is None:
            return None
        return self.rerun.batch_started(module, args, kwargs)

    def nonfinite_call(self, frame: Frame, caller: str | None, args: tuple[Any, ...], kwargs: Any) -> None:
        """Take a call that holds a non-finite value, while its forward is under way."""
        number = frame.batch
        if frame.recomputed and not self.batches.has_ended(number):
            # A recomputation has the number of the latest batch, which may be another thread's.
            number = ~number
        is_new = number not in self.batches
        if not frame.recomputed:
            self.rerun.call_failed(frame.name)

        def report() -> Report:
            given = [observe(x, label, "input") for label, x in call_leaves(args, kwargs or {})]
            return self._reports.of_failure(frame.batch, caller, given, nonfinite=frame)

        batch = self._take(number, frame.name, report)
        at_once = self._options.check in ("auto", "module") or frame.recomputed
        try:
            # A function is called when the forward has been left, as the re-run could wait for a lock that it holds.
            if at_once and (self._action == "raise" or (frame.recomputed and self._acts)):
                self._act(batch, inside=not frame.recomputed)
        finally:
            if frame.recomputed and is_new:  # the recorder reports no end of it
                self.batches.end(number)

    def pending_nonfinite_call(self, frame: Frame, caller: str | None, given: Frame, is_left: bool) -> None:
        """Take a call whose rows came from the device after it. The handler acts on it at the batch's end."""
        self._take(
            frame.batch,
            frame.name,
            lambda: self._reports.of_failure(frame.batch, caller, given.records, nonfinite=frame),
            is_left=is_left,
        )

    def step_follows(self, report: Report) -> None:
        """Act on a non-finite gradient that a step is about to take, or on a non-finite state of an optimizer."""
        self._monitor.on_nonfinite(report.finding)
        self.batches.open_run(report)
        self._batch_ends.active = True
        self._warnings.begin(report.finding)
        self._announce(report)
        if not self._acts:
            self._tell_sinks(report)
        self._raise_or_call(report)

    def forward_left(self, batch: int, completed: bool) -> None:
        """Take the end of this thread's forward, which has returned (`completed`) or raised.

        Raises PeerNonFiniteError from an error of a collective, when another rank's failure is behind it.
        """
        nonfinite = self.batches.get(batch)
        raised = None
        if nonfinite is not None:
            raised, nonfinite.raised = nonfinite.raised, None
        if completed:
            return
        if raised is not None:
            self._complete(raised)
        else:
            self.explain(sys.exc_info()[1])
        self._exception_batch = batch
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and batch % self._options.every == 0:
            self._annotate(error, batch)

    def conclude(self, batch: int, completed: bool) -> None:
        """Act on a batch that has ended and whose frames are all known, unless `nonfinite_call` has acted."""
        try:
            if (nonfinite := self.batches.get(batch)) is not None:
                if completed:
                    self._act(nonfinite)
            elif completed and batch % self._options.every == 0:
                self.batches.run_is_open = False
                self._ranks.end_run()
                self._warnings.end(batch)
                self._monitor.end(batch)
        finally:
            self.batches.end(batch)
            self._update_subscription()

    def batch_ended(self, batch: int) -> None:
        """Let go of the start of the batch, which has ended in this thread."""
        self.rerun.batch_ended(batch)
        self._update_subscription()

    def explain(self, error: BaseException | None) -> None:
        """Raise PeerNonFiniteError from `error` when another rank's failure is behind it."""
        explained = self._ranks.explain(error)
        if explained is not None:
            raise explained from error

    def run_ended(self, error: BaseException | None) -> None:
        """Take the end of a `with` block. Raises PeerNonFiniteError as `batch_started` does."""
        if error is not None:
            self.poll(wait=True)
            self._postponed = None  # `error` says more
            self.explain(error)
        else:
            self._ranks.check()

    def watch_ends(self) -> None:
        """Report non-finite gradients that no step was about to take, then sum up the warnings."""
        try:
            held = self._release()
            if held is not None and held.finding is not None:
                remarks = (*held.finding.remarks, "the watch ended before a step took it")
                finding = replace(held.finding, remarks=remarks)
                report = replace(held, finding=finding)
                self.batches.open_run(report)
                self._monitor.on_nonfinite(finding)
                self._warn_at_end(finding, report)
        finally:
            if self._guard is not None:
                self._guard.sum_up()
            batches = self._recorder.latest_batch + 1
            self._warnings.close(batches, may_raise=sys.exc_info()[0] is None)

    def close(self) -> None:
        """Let go of everything, and leave the other ranks."""
        self.rerun.let_go()
        self._ranks.close()

    @property
    def _acts(self) -> bool:
        """True if the user gets the report of each failure. Otherwise the run goes on by itself."""
        return self._action == "raise" or callable(self._action)

    def _release(self) -> Report | None:
        """Return the report of a deferred backward, which came first, and drop it."""
        return None if self._guard is None else self._guard.release()

    def _take(
        self,
        batch: int,
        module: str,
        report: Callable[[], Report],
        *,
        is_left: bool = False,
        announces: bool = True,
    ) -> NonFiniteBatch | None:
        """Count a non-finite call of the module. `report` makes the report, if the call is the first of its batch."""
        self._warnings.count(module)
        # A forward that is recomputed in the backward repeats the failure of its batch.
        if batch in self.batches:
            return self.batches.get(batch)
        if self._guard is not None:
            self._guard.settle_scaled()
        # A deferred backward came first: something else than an optimizer has moved the weights by its gradients.
        nonfinite = self.batches.add(batch, self._release() or report(), is_left=is_left)
        self._batch_ends.active = True
        if announces:
            self._announce(nonfinite.report)
        self._monitor.on_nonfinite(nonfinite.report.finding)
        if not self._acts:
            nonfinite.report = self._examined(nonfinite.report)
            self._tell_sinks(nonfinite.report)
            self._pass_on_interrupt(NonFiniteError(nonfinite.report))
        self._warnings.begin(nonfinite.report.finding)
        return nonfinite

    def _announce(self, report: Report) -> None:
        """Publish the failure to the other ranks, before anything slow."""
        if report.finding is not None:
            self._ranks.publish(report.finding, is_first=self.batches.failure is report)

    def _act(self, batch: NonFiniteBatch | None, *, inside: bool = False) -> None:
        """Act on the batch once. `inside` a forward raise at once, and leave the re-run to `forward_left`."""
        if batch is None or batch.is_reported:
            return
        batch.is_reported = True
        if inside and self._action == "raise":
            batch.raised = NonFiniteError(batch.report)
            # Raise it from no local: the traceback would hold itself, and with it the locals of the forward.
            raise batch.raised
        self._raise_or_call(batch.report)

    def _raise_or_call(self, report: Report) -> None:
        """Re-run the batch, then hand the report to the user's function, or raise it."""
        if self._acts:
            report = self._settled(report)
            self._tell_sinks(report)
        if callable(self._action):
            self._call(self._action, report)
        elif self._action == "raise":
            error = NonFiniteError(report, report.origin)
            self._pass_on_interrupt(error)
            raise error

    def _call(self, action: Callable[[Report], object], report: Report) -> None:
        try:
            action(report)
        finally:
            self._pass_on_interrupt(NonFiniteError(report))

    def _pass_on_interrupt(self, error: BaseException) -> None:
        """Raise what a signal's handler of the program raised during the re-run, now that its finding is complete."""
        interrupt = self.rerun.take_interrupt()
        if interrupt is not None:
            if isinstance(error, NonFiniteError):
                warn_user(f"{error}", may_raise=False)
            raise interrupt from error

    def _complete(self, error: NonFiniteError) -> None:
        """Add the results of the re-run to an error that was raised inside a forward, now that the forward is left.

        Inside, the re-run could wait for a lock that the forward holds. A second error would lose the notes that code
        in the forward has added to the first. No other exception is changed after it was raised.
        """
        report = self._settled(error.report)
        self._tell_sinks(report)
        NonFiniteError.__init__(error, report, report.origin)
        self._pass_on_interrupt(error)

    def _tell_sinks(self, report: Report) -> None:
        """Hand the complete report to the sinks.

        Where the run goes on by itself, only the first of several non-finite batches in a row is told.
        """
        if self._acts or self.batches.failure is report:
            self._monitor.sinks.on_failure(report)

    def _settled(self, report: Report) -> Report:
        """Return the report after the re-run, with the origin on which the ranks agreed."""
        examined = self._examined(report)
        origin = self._ranks.settle(examined.finding)
        if origin is None:
            return examined
        settled = replace(examined, origin=origin)
        if self.batches.failure is examined:
            self.batches.failure = settled
        return settled

    def _examined(self, report: Report) -> Report:
        """Return the report with the results of a re-run of its batch."""
        # Only the first of several non-finite batches in a row is re-run, unless each is raised.
        is_first = self.batches.failure is report
        if not is_first and self._action != "raise":
            return report
        # A batch that its thread has left cannot run again: its arguments are gone, and the weights may have changed.
        batch = None if report.batch is None else self.batches.get(report.batch)
        examined = self.rerun.examine(report, is_late=batch is not None and batch.is_left)
        if is_first:
            self.batches.failure = examined
        return examined

    def _warn_at_end(self, finding: Finding, report: Report) -> None:
        """Report gradients that no step was about to take. They are no failure yet, so "raise" warns too."""
        is_raising = sys.exc_info()[0] is not None
        examined = self._examined(report)
        self._tell_sinks(examined)
        if self._action in ("raise", "warn"):
            warn_user(
                f"{text.summary(examined.finding or finding)}; the watch ended before a step took it;"
                " Watch.report() (or --output-dir) has the frames that led to it",
                may_raise=not is_raising,
            )
        elif callable(self._action):
            try:
                self._call(self._action, examined)
            except Exception:
                if not is_raising:
                    raise
                suppressed("on_nonfinite raised while the watch ended by another error")

    def _annotate(self, error: Exception, batch: int) -> None:
        """Add a note with the non-finite value to somebody else's exception that ends the batch."""
        if isinstance(error, NonFiniteError | BatchLimitError):
            return
        try:
            nonfinite = self.batches.get(batch) or self._take_left_calls(error, batch)
            if nonfinite is not None and not nonfinite.is_reported:
                nonfinite.is_reported = True
                report = nonfinite.report
                if callable(self._action):
                    report = self._settled(report)
                elif self._acts:
                    report = self._examined(report)
                if self._acts:
                    self._tell_sinks(report)
                add_note(error, report)
                if callable(self._action):
                    self._action(report)
                self._pass_on_interrupt(error)
        except Exception:  # the user's error matters more
            suppressed("what an exception of the user's left could not be told")

    def _take_left_calls(self, error: Exception, batch: int) -> NonFiniteBatch | None:
        """Read the calls that the exception left, and take the first non-finite one."""
        calls = left_calls(error)
        # Without calls the exception ended something else, such as a call in compiled code.
        report = self._reports.of_left_calls(calls, batch) if calls else None
        if report is None or report.finding is None:
            return None
        # Somebody may catch the exception and go on, so it is not published to the other ranks.
        return self._take(batch, report.finding.module, lambda: report, announces=False)

    def _write_last_frames(self, name: str) -> Report:
        """Write and return the latest frames of a rank without a failure of its own, from any thread."""
        latest = self._recorder.latest_batch
        report = self._reports.latest(None, None if latest < 0 else latest)
        self.rerun.write_frames(report, name)
        return report
