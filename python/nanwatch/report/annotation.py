"""Annotation of a report: one sentence at a place in the source, for tools that show findings beside the code."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..util.place import Place
from ..util.visible import module_name, visible
from .report import Report
from .spike import SpikeReport
from .text import summary


class Annotation(NamedTuple):
    """Finding in the terms of SARIF and of code hosts. `place` is None where no re-run has found the operation."""

    rule: str
    level: Literal["error", "warning"]
    text: str
    module: str
    place: Place | None


def annotation_of(report: Report | SpikeReport) -> Annotation | None:
    """Return the annotation of a failure (an error) or of a spike (a warning), None when all is finite."""
    if isinstance(report, SpikeReport):
        module = "" if report.first is None else report.first.module
        return _annotation(f"spike {report.cause}", "warning", report.summary, module, None)
    finding, explanation = report.finding, report.explanation
    if finding is None or explanation is None:
        return None
    words = f"{summary(finding)}. Why: {explanation.reason} Next: {explanation.advice}"
    return _annotation(explanation.reason.code, "error", words, finding.module, finding.place)


def _annotation(
    code: str, level: Literal["error", "warning"], words: str, module: str, place: Place | None
) -> Annotation:
    """Return the annotation, with the code of the reason spelt as an identifier."""
    rule = code.replace(" ", "-").replace("'", "")
    return Annotation(rule, level, visible(words), module_name(module), place)
