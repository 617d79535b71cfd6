"""Judge of the findings of the failing models: each is compared with the truth that stands beside its model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch
from cures.overflows import is_finite

from nanwatch.numerics import _extension
from nanwatch.report.finding import Finding
from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import watch

from .case import Case


@dataclass(frozen=True)
class Verdict:
    """What is wrong in the finding of one case, "" for what is right."""

    case: str
    place: str
    operation: str
    transient: str
    cures: str

    @property
    def is_right(self) -> bool:
        """Return whether nothing is wrong."""
        return not (self.place or self.operation or self.transient or self.cures)

    def __str__(self) -> str:
        wrong = [text for text in (self.place, self.operation, self.transient, self.cures) if text]
        return f"{'right' if self.is_right else 'WRONG'}  {'; '.join([self.case, *wrong])}"


def judge(case: Case) -> Verdict:
    """Compare the finding of the case with its truth."""
    finding = finding_of(case)
    cures = wrong_cures(case, finding) if case.format_cause else ""
    return Verdict(
        case.name,
        wrong_place(case, finding),
        wrong_operation(case, finding),
        wrong_transient(case, finding),
        cures,
    )


def finding_of(case: Case, *, native: bool = True) -> Finding:
    """Return the finding of the error that the case raises under a watch."""
    setup = case.build()
    recorder = contextlib.nullcontext() if native else mock.patch.object(_extension, "C", None)
    with recorder, watch(setup.model):
        try:
            setup.run()
        except NonFiniteError as error:
            finding = error.report.finding
            assert finding is not None
            return finding
    raise AssertionError(f"{case.name} should raise, and did not")


def wrong_place(case: Case, finding: Finding) -> str:
    """Compare module, tensor, origin and value."""
    said = (finding.module, finding.label, finding.origin, finding.source_module, finding.value)
    truth = (case.module, case.label, case.origin, case.source_module, case.value)
    return "" if said == truth else f"found {said}, truth: {truth}"


def wrong_operation(case: Case, finding: Finding) -> str:
    """Compare the operation and its line. Where the call made nothing bad, the finding should name none."""
    if not case.operations:
        # For bad data the finding names the operation that hands it on.
        handed_on = finding.origin == "data" and case.file.name in (finding.source or "")
        is_right = finding.operation is None or handed_on
    else:
        is_right = (
            finding.operation is not None
            and finding.operation.split(".")[1] in case.operations
            and (finding.source or "").endswith(f"{case.file.name}:{case.line}")
        )
    if is_right:
        return ""
    truth = f"{case.operations} at {case.file.name}:{case.line}" if case.operations else "none"
    return f"{finding.operation} at {finding.source}, truth: {truth}"


def wrong_transient(case: Case, finding: Finding) -> str:
    """Compare what the re-run showed: finite makes a finding transient, another failure does not."""
    is_right = finding.transient is True if case.transient else not finding.transient
    return "" if is_right else f"transient is {finding.transient}"


def wrong_cures(case: Case, finding: Finding) -> str:
    """Look for a cure that works, and apply each that is said to, but for changes of the source."""
    working = [cure for cure in finding.cures if cure.works]
    if not working:
        return "no cure works"
    setup = case.build()
    if setup.loop is not None:
        return ""
    for cure in working:
        if cure.patch:
            continue  # judge_cures.py and test_cures_applied apply patches
        torch.manual_seed(0)
        if not is_finite(setup.model, setup.args, setup.kwargs, setup.autocast, cure.what):
            return f"is not finite with: {cure.what}"
    return ""
