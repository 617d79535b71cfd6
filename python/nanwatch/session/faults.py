"""Handling of non-finite values: report them, warn of them, and act when it is due."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..diagnosis.left_calls import left_calls
from ..monitoring.monitor import Monitor
from ..recording.listener import Recorder
from ..recording.observe import observe
from ..recording.walk import call_leaves
from ..report.errors import BatchLimitError, NonFiniteError
from ..report.frame import FrameRows
from ..report.record import Record, is_fault, to_record
from ..report.report import Report
from ..util.suppressed import suppressed
from .fault_warnings import FaultWarnings
from .faulty_batches import FaultyBatch, FaultyBatches
from .left_frames import left_frames
from .options import Options
from .reports import Reports
from .response import Response


class Faults:
    """The faults that a watch meets, from the first of a batch to the response.

    `release()` gives up the report of a backward that no step has been about to take, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        recorder: Recorder,
        response: Response,
        outlook: Monitor,
        reports: Reports,
        release: Callable[[], Report | None],
    ) -> None:
        self._model = weakref.ref(model)
        self._options = options
        self._recorder = recorder
        self._response = response
        self._outlook = outlook
        self._reports = reports
        self._release = release
        self.batches = FaultyBatches()
        # A backward fails when its batch has ended: with gradients one finite batch says nothing of its own.
        self._warnings = FaultWarnings(
            speaks=options.on_nonfinite == "warn", patience=2 if options.gradients else 1
        )
        self._exception_batch: int | None = None

    @property
    def awaits_batches(self) -> bool:
        """Whether the ends of batches are to be told."""
        return bool(self.batches) or self._warnings.awaits_batches

    @property
    def ended_by_exception(self) -> bool:
        """Whether the latest batch ended by an exception."""
        return self._exception_batch is not None and self._exception_batch == self._recorder.latest_batch

    def fault(self, frame: FrameRows, caller: str | None, args: tuple[Any, ...], kwargs: Any) -> None:
        """See Listener."""
        number = frame.batch
        if frame.recomputed and not self.batches.has_ended(number):
            # A recomputation has the number of the latest batch, which may be another thread's.
            number = ~number
        is_new = number not in self.batches

        def report() -> Report:
            given = [observe(x, label, "input") for label, x in call_leaves(args, kwargs or {})]
            return self._reports.of_fault(frame.batch, caller, _records(given), faulty=frame)

        faulty = self._meet(number, frame.name, report)
        at_once = self._options.check in ("auto", "module") or frame.recomputed
        try:
            if at_once and self._response.acts:
                self._act(faulty, inside=not frame.recomputed)
        finally:
            if frame.recomputed and is_new:  # its end is told to nobody
                self.batches.end(number)

    def late_fault(self, frame: FrameRows, caller: str | None, given: FrameRows, is_left: bool) -> None:
        """See Listener."""
        self._meet(
            frame.batch,
            frame.name,
            lambda: self._reports.of_fault(frame.batch, caller, _records(given.rows), faulty=frame),
            is_left=is_left,
        )

    def step_follows(self, report: Report) -> None:
        """A step is about to take what a backward did wrong, or has left its optimizer so: act."""
        self._outlook.on_nonfinite(report.finding)
        self.batches.open_run(report)
        self._recorder.tells_batch_end = True
        self._warnings.begin(report.finding)
        self._response.announce(report)
        self._response.act(report, self._look_closer)

    def forward_left(self, batch: int, completed: bool) -> None:
        """This thread's forward has returned (`completed`) or raised."""
        self._response.batch_left(completed, self._look_closer)
        if not completed:
            self._exception_batch = batch
            error = sys.exc_info()[1]
            if isinstance(error, Exception) and batch % self._options.every == 0:
                self._left_by(error, batch)

    def conclude(self, batch: int, completed: bool) -> None:
        """All frames of a batch are known, and it has ended: act where that was put off."""
        if (faulty := self.batches.get(batch)) is not None:
            try:
                if completed:
                    self._act(faulty)
            finally:
                self.batches.end(batch)
        elif completed and batch % self._options.every == 0:
            self.batches.run_is_open = False
            self._warnings.end(batch)
            self._outlook.end(batch)

    def watch_ends(self) -> None:
        """Tell of gradients that are not finite and that no step was about to take; then sum up the warnings."""
        try:
            held = self._release()
            if held is not None and held.finding is not None:
                remarks = (*held.finding.remarks, "the watch ended before a step took it")
                report = replace(held, finding=replace(held.finding, remarks=remarks))
                self.batches.open_run(report)
                self._outlook.on_nonfinite(report.finding)
                self._response.tell_at_end(report, self._look_closer)
        finally:
            batches = self._recorder.latest_batch + 1
            self._warnings.close(batches, may_raise=sys.exc_info()[0] is None)

    def _meet(
        self,
        batch: int,
        module: str,
        report: Callable[[], Report],
        *,
        is_left: bool = False,
        announces: bool = True,
    ) -> FaultyBatch | None:
        """Count a faulty call of the module. `report` makes the report, of the first of its batch."""
        self._warnings.count(module)
        # A forward that is recomputed in the backward repeats what its batch has told.
        if batch in self.batches:
            return self.batches.get(batch)
        # Weights that something else than an optimizer moved by what the backward did wrong: that came first.
        faulty = self.batches.add(batch, self._release() or report(), is_left=is_left)
        self._recorder.tells_batch_end = True
        if announces:
            self._response.announce(faulty.report)
        self._outlook.on_nonfinite(faulty.report.finding)
        if not self._response.acts:
            faulty.report = self._look_closer(faulty.report)
        self._warnings.begin(faulty.report.finding)
        return faulty

    def _act(self, faulty: FaultyBatch | None, *, inside: bool = False) -> None:
        if faulty is not None and not faulty.is_told:
            faulty.is_told = True
            self._response.act(faulty.report, self._look_closer, inside=inside)

    def _look_closer(self, report: Report) -> Report:
        # Of faulty batches in a row the first tells most.
        is_first = self.batches.failure is report
        if not is_first and self._options.on_nonfinite != "raise":
            return report
        # A batch that its thread has left cannot run again: its arguments are gone, and the weights may have changed.
        faulty = None if report.batch is None else self.batches.get(report.batch)
        closer = self._response.look_closer(report, is_late=faulty is not None and faulty.is_left)
        if is_first:
            self.batches.failure = closer
        return closer

    def _left_by(self, error: Exception, batch: int) -> None:
        """Say, in a note of somebody else's exception that ends the batch, what was not finite in it."""
        if isinstance(error, NonFiniteError | BatchLimitError):
            return
        try:
            faulty = self.batches.get(batch) or self._meet_left(error, batch)
            if faulty is not None and not faulty.is_told:
                faulty.is_told = True
                self._response.note(error, faulty.report, self._look_closer)
        except Exception:  # the user's error matters more
            suppressed("what an exception of the user's left could not be told")

    def _meet_left(self, error: Exception, batch: int) -> FaultyBatch | None:
        """Look at the calls that the exception left."""
        model, calls = self._model(), left_calls(error)
        # Without calls the exception ended something else, such as a call in compiled code.
        if model is None or not calls:
            return None
        left = left_frames(calls, batch, model, self._options)
        bad = next((i for i, frame in enumerate(left.frames) if any(map(is_fault, frame.rows))), None)
        if bad is None:
            return None
        return self._meet(
            batch,
            left.frames[bad].name,
            lambda: self._reports.of_fault(
                batch, left.callers[bad], _records(left.given), left.frames[: bad + 1]
            ),
            # The others hear of this rank's exception as they would without a watch: who catches it goes on.
            announces=False,
        )


def _records(rows: list[Any]) -> list[Record]:
    return [to_record(row) for row in rows]
