"""Folder of a failure or a spike below `output_dir`: text, JSON, page, patch and capsule.

What cannot be written is a remark in what can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import nn

from ..capsule.capsule import make_numbered, write_capsule
from ..instrumentation.wrapped_names import module_names
from ..report.finding import Finding
from ..report.forms import AnyReport, Form, folder_forms, forms
from ..report.report import Report
from ..report.spike import SpikeReport
from ..util.progress import silent
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot
from .diagnosis import Diagnosis, ModuleCall
from .incident import Incident

PATCH_FILE = "cure.patch"

_T = TypeVar("_T")
_Told = TypeVar("_Told", Report, SpikeReport)


def attempt(what: str, step: Callable[[], _T], remark: Callable[[str], object]) -> _T | None:
    """Return the result of the step, or None with a remark where it raised."""
    try:
        return step()
    except Exception as error:
        remark(f"{what} failed: {spell(error)}")
        return None


def write_failure(
    incident: Incident, diagnosis: Diagnosis | None, snapshot: BatchSnapshot | None, output_dir: Path
) -> None:
    """Write the report of a failure in its forms, a capsule and a patch, and note the files in the report."""
    finding, rank = incident.finding, incident.report.rank

    def told(files: Iterable[str], remarks: Iterable[str]) -> Report:
        incident.learn(files=tuple(files), remarks=(*finding.remarks, *remarks))
        return incident.report

    remarks: list[str] = []
    name = f"batch-{finding.batch}" + (f"-rank-{finding.rank}" if finding.rank else "")
    folder = attempt("making the folder", lambda: _new_folder(output_dir / name), remarks.append)
    if folder is None:
        told((), remarks)
        return
    files: list[str] = []
    call = None if diagnosis is None else diagnosis.call
    if call is None or snapshot is None:
        unseen = "no call was seen to make the value a second time"
        why = unseen if finding.phase == "forward" else "a capsule replays a forward"
        remarks.append(f"no capsule was written: {why}")
    else:
        files += _written_capsule(folder, call, snapshot, finding, rank, remarks)
    patch = next((cure.patch for cure in finding.cures if cure.works and cure.patch), "")
    if patch:
        files += _written(PATCH_FILE, lambda: _write_whole(folder / PATCH_FILE, patch), remarks)
    _write_forms(told, folder_forms(), folder, files, remarks)


def write_spike(
    report: SpikeReport, start: BatchSnapshot | None, model: nn.Module | None, output_dir: Path
) -> SpikeReport:
    """Write the report and a capsule of its batch, as far as that can be done. Return it with files and remarks."""
    remarks: list[str] = []
    name = f"spike-batch-{report.batch}" + (f"-rank-{report.rank}" if report.rank else "")
    folder = attempt("making the folder", lambda: _new_folder(output_dir / name), remarks.append)
    if folder is None:
        return replace(report, remarks=tuple(remarks))
    files: list[str] = []
    called = None if start is None or model is None else module_names(model).get(start.module)
    if start is None or called is None:
        remarks.append("no capsule was written: the start of the batch was not kept")
    else:
        call = ModuleCall(called, start.module, start.args, start.kwargs)
        files += _written_capsule(folder, call, start, None, report.rank, remarks)

    def told(files: Iterable[str], remarks: Iterable[str]) -> SpikeReport:
        return replace(report, files=tuple(files), remarks=tuple(remarks))

    return _write_forms(told, folder_forms(), folder, files, remarks)


def _written_capsule(
    folder: Path,
    call: ModuleCall,
    snapshot: BatchSnapshot,
    finding: Finding | None,
    rank: int,
    remarks: list[str],
) -> list[str]:
    write = partial(
        write_capsule,
        folder / "capsule",
        call.module,
        call.name,
        call.args,
        call.kwargs,
        finding=finding,
        rank=rank,
        rng=call.rng or snapshot.rng,
        autocast=call.autocast or snapshot.autocast,
    )
    return _written("the capsule", write, remarks)


def _written(what: str, write: Callable[[], Path], remarks: list[str]) -> list[str]:
    """Return the path that was written, or nothing."""
    made = attempt(f"writing {what}", write, remarks.append)
    return [] if made is None else [str(made)]


def _write_forms(
    told: Callable[[Iterable[str], Iterable[str]], _Told],
    chosen: Collection[Form],
    folder: Path,
    files: list[str],
    remarks: list[str],
) -> _Told:
    """Write the forms of a report, each naming all files; again, should one of them not be written after all.

    `told` makes the report from its files and remarks.
    """
    report = told([*files, *(str(folder / _file_of(form)) for form in chosen)], remarks)
    troubles = list(remarks)
    written = [
        form
        for form in chosen
        if _written(_file_of(form), partial(_write_form, report, form, folder), troubles)
    ]
    if len(written) == len(chosen):
        return report
    return _write_forms(told, written, folder, files, troubles)


def _file_of(form: Form) -> str:
    return f"report.{form.suffix}"


def _write_form(report: AnyReport, form: Form, folder: Path) -> Path:
    return _write_whole(folder / _file_of(form), form.render(report, silent))


def _write_whole(path: Path, text: str) -> Path:
    """Write all of the text, or leave no file of this name: a launcher may end this process meanwhile."""
    under_way = path.with_name(f".{path.name}.tmp")
    try:
        under_way.write_text(text, encoding="utf-8")
        return under_way.replace(path)
    except OSError:
        under_way.unlink(missing_ok=True)
        raise


def write_frames(report: Report, folder: Path) -> Path:
    """Write a report without a finding, as JSON and text; the folder, which has a number where that is taken.

    No page: of thousands of ranks most have nothing to show. Raises what writing raises.
    """
    made = _new_folder(folder)
    for name in ("json", "text"):
        _write_form(report, forms()[name], made)
    return made


def _new_folder(folder: Path) -> Path:
    return make_numbered(folder, lambda one: one.mkdir(parents=True))
