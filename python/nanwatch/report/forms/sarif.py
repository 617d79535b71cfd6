"""SARIF 2.1.0, which editors and code hosts show at the line."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from ..._version import __version__
from ...util.progress import Tell
from ..annotation import Annotation, annotation_of
from . import AnyReport, Form

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def _render(report: AnyReport, tell: Tell) -> str:
    annotation = annotation_of(report)
    results = [] if annotation is None else [_result(annotation)]
    driver = {
        "name": "nanwatch",
        "version": __version__,
        "rules": [{"id": result["ruleId"]} for result in results],
    }
    runs = [{"tool": {"driver": driver}, "results": results}]
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": runs}, allow_nan=False, indent=1)


def _result(annotation: Annotation) -> dict[str, Any]:
    location: dict[str, Any] = {
        "logicalLocations": [{"fullyQualifiedName": annotation.module, "kind": "module"}]
    }
    if annotation.place is not None:
        # Without columns: ours are bytes, those of SARIF are characters.
        location["physicalLocation"] = {
            "artifactLocation": {"uri": _uri(annotation.place.file)},
            "region": {"startLine": annotation.place.line},
        }
    return {
        "ruleId": annotation.rule,
        "level": annotation.level,
        "message": {"text": annotation.text},
        "locations": [location],
    }


def _uri(file: str) -> str:
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


FORM = Form("sarif", "sarif", _render, in_folder=False)
