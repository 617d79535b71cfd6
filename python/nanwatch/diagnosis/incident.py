"""Incident: a failure from its first non-finite value to the exception, and what is known of it by now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..report.finding import Finding
from ..report.report import NonFiniteError, Report

if TYPE_CHECKING:
    from .batch_snapshot import BatchSnapshot


@dataclass(slots=True, eq=False)
class Incident:
    """A failure, which is seen, told to the other ranks, examined, written and raised, in this order.

    `report` is what is known by now. Each new fact replaces it, so that a report which was handed out stays as it was.
    `call` is the failed call itself, in a job of several processes, where the batch cannot run again. `raised` is the
    error that was raised inside the forward. `is_finished`: the incident was raised or handed over.
    """

    report: Report
    call: BatchSnapshot | None = None
    raised: NonFiniteError | None = None
    is_finished: bool = False

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

    def let_go(self) -> None:
        """Keep nothing of the batch but the report."""
        self.call = self.raised = None
