"""Text, with all frames of a failure."""

from __future__ import annotations

from ...util.progress import Tell
from ..report import Report
from . import AnyReport, Form


def _render(report: AnyReport, tell: Tell) -> str:
    tell("making the text")
    return report.to_text(whole=True) if isinstance(report, Report) else report.to_text()


FORM = Form("text", "txt", _render)
