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
from .microscope import examine, no_second_run
from .report import Report

_T = TypeVar("_T")


def post_mortem(
    report: Report,
    start: BatchStart | None,
    model: nn.Module,
    output_dir: Path | None,
    *,
    examines: bool,
    reason: str = "",
) -> Report:
    """The report with what a second run of the batch shows, if it `examines`, and written to `output_dir` if any.

    `start` is None where the batch cannot be run again; a `reason` says in words why it must not be.
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
        remarks.append(
            "the batch was not run a second time: its outermost call lies in compiled code or in a backward,"
            " or what it was given could not be kept"
        )
    elif reason := reason or no_second_run():
        remarks.append(f"the batch was not run a second time: {reason}")
        start = None
    if start is not None:
        examination = _attempt("the closer look", lambda: examine(start, first, model=model), remarks)
        if examination is not None:
            finding = enrich(finding, examination)
        if doubts := start.doubts():
            remarks.append(f"no cure was tried, as {doubts[0]}")
        elif examination is not None and examination.transient is not True:
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
    failed: set[str] = set()
    folder = _attempt("making the folder", lambda: _new_folder(output_dir, finding), remarks)
    if folder is None:
        return replace(report, finding=replace(finding, remarks=(*finding.remarks, *remarks)))

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
    else:
        remarks.append("no capsule was written: no call was seen to make the value a second time")
    if _written(folder / "report.html", report.to_html, remarks):
        files.append(str(folder / "report.html"))
    # These two name the files that are there, themselves too: written twice where the second could not be.
    for _ in range(2):
        names = [name for name in ("report.json", "report.txt") if name not in failed]
        told = replace(
            finding,
            files=(*files, *(str(folder / name) for name in names)),
            remarks=(*finding.remarks, *remarks),
        )
        report = replace(report, finding=told)
        before = len(remarks)
        for name, form in (("report.json", report.to_json), ("report.txt", report.to_text)):
            if name in names and not _written(folder / name, form, remarks):
                failed.add(name)
        if len(remarks) == before:
            break
    else:
        report = replace(
            report, finding=replace(told, files=tuple(files), remarks=(*finding.remarks, *remarks))
        )
    return report


def _written(path: Path, form: Callable[[], str], remarks: list[str]) -> bool:
    done = _attempt(f"writing {path.name}", lambda: path.write_text(form(), encoding="utf-8"), remarks)
    return done is not None


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
