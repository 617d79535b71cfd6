"""Workflow command of GitHub Actions, which shows a line on stdout as an annotation of the source."""

from __future__ import annotations

import os
from pathlib import PurePath

from ...util.progress import Tell
from ..annotation import annotation_of
from . import AnyReport, Form


def _render(report: AnyReport, tell: Tell) -> str:
    annotation = annotation_of(report)
    if annotation is None:
        return "::notice title=nanwatch::all that was read is finite"
    properties = {"title": f"nanwatch {annotation.rule}"}
    if annotation.place is not None:
        properties = {
            "file": _in_work_tree(annotation.place.file),
            "line": str(annotation.place.line),
            **properties,
        }
    listed = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{annotation.level} {listed}::{_escaped(annotation.text)}"


def _in_work_tree(file: str) -> str:
    """Return the path as GitHub knows it: relative to the checkout."""
    root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    path = PurePath(file)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else file


def _escaped(text: str, also: str = "") -> str:
    for character in f"%\r\n{also}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


FORM = Form("github", "txt", _render, in_folder=False)
