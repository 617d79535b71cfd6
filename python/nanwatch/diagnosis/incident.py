"""Incident: a failure from its first non-finite value to the exception, and what is known of it by now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ..report.finding import Finding
from ..report.report import NonFiniteError, Report
from ..util.visible import warn_user

if TYPE_CHECKING:
    from .batch_snapshot import BatchSnapshot


@dataclass(slots=True, eq=False)
class Incident:
    """A failure with a life: seen, told to the other ranks, examined, written, raised.

    `report` is what is known by now. Each new fact replaces it, so that a report which was handed out stays as it was.
    `call` is the failed call itself, in a job of several processes, where the batch cannot run again. `is_reported`:
    the error was raised, or the user's function has the report. `raised` is an error that was raised inside the
    forward, until the forward is left. `interrupt` is what a signal handler of the program raised during the re-run.
    """

    report: Report
    call: BatchSnapshot | None = None
    is_reported: bool = False
    raised: NonFiniteError | None = None
    interrupt: BaseException | None = None

    @property
    def finding(self) -> Finding:
        """The finding as it is known by now."""
        finding = self.report.finding
        assert finding is not None, "a failure has a finding"
        return finding

    @finding.setter
    def finding(self, finding: Finding) -> None:
        self.report = replace(self.report, finding=finding)

    def learn(self, **facts: Any) -> None:
        """Set these fields of the finding."""
        self.finding = replace(self.finding, **facts)

    def remark(self, *remarks: str) -> None:
        """Add these remarks to the finding."""
        self.learn(remarks=(*self.finding.remarks, *remarks))

    def pass_on_interrupt(self, error: BaseException | None) -> NoReturn:
        """Raise the interrupt from `error`, or from an error with the report."""
        cause = NonFiniteError(self.report) if error is None else error
        interrupt, self.interrupt = self.interrupt, None
        assert interrupt is not None
        if isinstance(cause, NonFiniteError):
            warn_user(f"{cause}", may_raise=False)
        raise interrupt from cause

    def let_go(self) -> None:
        """Keep nothing of the batch but the report."""
        self.call = self.raised = None
