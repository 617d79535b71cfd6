"""Forms of a report: text, JSON, a page, and SARIF for editors and code hosts.

A form is an entry of FORMS. `nanwatch show --format` takes its name, and `output_dir` gets those that are `in_folder`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

from .._version import __version__
from ..util.messages import module_name, visible
from .finding import Place
from .report import Report
from .spike import SpikeReport
from .text import summary

AnyReport: TypeAlias = Report | SpikeReport
_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


class Form(NamedTuple):
    """Form of a report: its name, the suffix of its file, and the function that renders a report in it."""

    name: str
    suffix: str
    render: Callable[[AnyReport], str]
    in_folder: bool = True


class Annotation(NamedTuple):
    """Finding in the terms of SARIF and of code hosts. `place` is None where no re-run has found the operation."""

    rule: str
    level: Literal["error", "warning"]
    text: str
    module: str
    place: Place | None


def annotation_of(report: AnyReport) -> Annotation | None:
    """Return the annotation of a failure (an error) or of a spike (a warning), None when all is finite."""
    level: Literal["error", "warning"] = "error"
    module, place = "", None
    if isinstance(report, SpikeReport):
        code, level, words = f"spike {report.cause}", "warning", report.summary
        module = "" if report.first is None else report.first.module
    else:
        finding, explanation = report.finding, report.explanation
        if finding is None or explanation is None:
            return None
        code, module, place = explanation.reason.code, finding.module, finding.place
        cure = next((f" Cure: {cure.what}." for cure in finding.cures if cure.works), "")
        words = f"{summary(finding)}. Why: {explanation.reason}{cure} Next: {explanation.advice}"
    rule = code.replace(" ", "-").replace("'", "")
    return Annotation(rule, level, visible(words), module_name(module), place)


def _text(report: AnyReport) -> str:
    return report.to_text(whole=True) if isinstance(report, Report) else report.to_text()


def _sarif(report: AnyReport) -> str:
    annotation = annotation_of(report)
    results = [] if annotation is None else [_sarif_result(annotation)]
    rules = [{"id": result["ruleId"]} for result in results]
    driver = {"name": "nanwatch", "version": __version__, "rules": rules}
    runs = [{"tool": {"driver": driver}, "results": results}]
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": runs}, allow_nan=False, indent=1)


def _sarif_result(annotation: Annotation) -> dict[str, Any]:
    location: dict[str, Any] = {
        "logicalLocations": [{"fullyQualifiedName": annotation.module, "kind": "module"}]
    }
    if annotation.place is not None:
        path = PurePath(annotation.place.file)
        # Leave out the columns: a Place counts bytes, SARIF counts characters.
        location["physicalLocation"] = {
            "artifactLocation": {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())},
            "region": {"startLine": annotation.place.line},
        }
    return {
        "ruleId": annotation.rule,
        "level": annotation.level,
        "message": {"text": annotation.text},
        "locations": [location],
    }


FORMS = {
    form.name: form
    for form in (
        Form("text", "txt", _text),
        Form("json", "json", lambda report: report.to_json()),
        Form("html", "html", lambda report: report.to_html()),
        Form("sarif", "sarif", _sarif, in_folder=False),
    )
}
