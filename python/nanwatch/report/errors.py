"""The exceptions a watched model may raise."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..util.suppressed import suppressed
from . import text

if TYPE_CHECKING:
    from .rank_observation import Origin
    from .report import Report


class NonFiniteError(ValueError):
    """A watched module call held a nan or an inf. `.report` has the frames that led to it and the finding.

    `.origin` says, in a job of several ranks, where it was first among all of them; None in a job of one.
    """

    def __init__(self, report: Report, origin: Origin | None = None) -> None:
        super().__init__(report, origin)
        self.report = report
        self.origin = origin

    def __str__(self) -> str:
        return _told(self.report, self.origin)


def add_note(error: BaseException, report: Report) -> None:
    """Add what was not finite to somebody else's exception, as a note under its traceback (PEP 678). Raises nothing."""
    note = f"nanwatch: {_told(report)}"
    try:
        if sys.version_info >= (3, 11):
            error.add_note(note)
        else:  # Python shows none, but pytest and others do
            vars(error).setdefault("__notes__", []).append(note)
    except Exception:  # a class of exceptions may have an `add_note` of its own
        suppressed("an exception of the user's took no note")


def _told(report: Report, origin: Origin | None = None) -> str:
    head = "a non-finite value" if report.finding is None else text.summary(report.finding)
    if origin is not None:
        head += f"\nAmong the ranks: {origin}"
    return f"{head}\n\n{report.to_text()}"


class BatchLimitError(ValueError):
    """The run was asked to end after a batch, and that batch is done. `.batch` is its number."""

    def __init__(self, batch: int, option: str) -> None:
        super().__init__(batch, option)
        self.batch = batch
        self.option = option

    def __str__(self) -> str:
        asked = f"{self.option}={self.batch}"
        return f"stopped after batch {self.batch}, as {asked} asks; leave the option out to run on"
