"""What is done once a batch has failed: look closer, try cures, write it all down.

Each step may be missing a package, run out of memory or meet a model that cannot be run twice: then a remark says so,
and the report is what it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from .batch_start import BatchStart
from .capsule import write_capsule
from .cures import try_cures
from .examination import Call, Examination, enrich
from .finding import Finding
from .microscope import examine
from .report import Report

_T = TypeVar("_T")


def post_mortem(
    report: Report, start: BatchStart | None, model: nn.Module, output_dir: Path | None, *, examines: bool
) -> Report:
    """The report with what a second run of the batch shows, if it `examines`, and written to `output_dir` if any.

    `start` is None where the batch cannot be run again.
    """
    first = report.finding
    if first is None:
        return report
    finding = first
    remarks: list[str] = []
    examination: Examination | None = None
    if not examines:
        start = None
    elif start is None:
        remarks.append("the batch was not run a second time: its outermost call lies in compiled code")
    if start is not None:
        examination = _attempt("the closer look", lambda: examine(start, first, model=model), remarks)
        if examination is not None:
            finding = enrich(finding, examination)
        if examination is not None and examination.transient is not True:
            known = finding
            tried = _attempt("trying cures", lambda: try_cures(start, known, model), remarks)
            if tried is not None:
                finding = replace(finding, cures=tried[0], remarks=(*finding.remarks, *tried[1]))
    finding = replace(finding, remarks=(*finding.remarks, *remarks))
    report = replace(report, finding=finding)
    return report if output_dir is None else _write(report, finding, examination, start, output_dir)


def _attempt(what: str, step: Callable[[], _T], remarks: list[str]) -> _T | None:
    try:
        return step()
    except Exception as error:
        remarks.append(f"{what} failed: {type(error).__name__}: {error}")
        return None


def _write(
    report: Report,
    finding: Finding,
    examination: Examination | None,
    start: BatchStart | None,
    output_dir: Path,
) -> Report:
    remarks: list[str] = []
    files: list[str] = []
    folder = _attempt("making the folder", lambda: _new_folder(output_dir, finding), remarks)
    if folder is None:
        return replace(report, finding=replace(finding, remarks=(*finding.remarks, *remarks)))

    def write(name: str, form: Callable[[], str]) -> None:
        (folder / name).write_text(form(), encoding="utf-8")
        files.append(str(folder / name))

    call = None if examination is None else examination.call
    if call is not None and start is not None:

        def capsule(call: Call = call, start: BatchStart = start) -> None:
            folder_made = write_capsule(
                folder / "capsule",
                call.module,
                call.name,
                call.args,
                call.kwargs,
                finding=finding,
                rank=report.rank,
                rng=call.rng or start.rng,
                autocast=call.autocast or start.autocast,
            )
            files.append(str(folder_made))

        _attempt("writing the capsule", capsule, remarks)
    _attempt("writing report.html", lambda: write("report.html", report.to_html), remarks)
    # These two name the files that are there.
    told = replace(
        finding,
        files=(*files, str(folder / "report.json"), str(folder / "report.txt")),
        remarks=(*finding.remarks, *remarks),
    )
    report = replace(report, finding=told)
    _attempt("writing report.json", lambda: write("report.json", report.to_json), remarks)
    _attempt("writing report.txt", lambda: write("report.txt", report.to_text), remarks)
    return report


def _new_folder(output_dir: Path, finding: Finding) -> Path:
    base = f"batch-{finding.batch}" + (f"-rank-{finding.rank}" if finding.rank else "")
    for number in range(1, 10_000):
        folder = output_dir / (base if number == 1 else f"{base}.{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{output_dir / base} and 9,998 more like it exist; clear {output_dir}")
