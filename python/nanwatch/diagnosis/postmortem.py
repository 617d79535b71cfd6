"""The steps after a batch has failed: look closer, try cures, write it all down.

Each step may be missing a package, run out of memory or meet a model that cannot be run twice: then a remark says so,
and the report is what it was before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from ..capsule.capsule import make_numbered, write_capsule
from ..instrumentation.wrapped_names import module_names
from ..report.finding import Finding, working_first
from ..report.record import Frame
from ..report.report import Report
from ..report.spike import SpikeReport
from ..util.visible import spell
from .backward_rerun import rerun_backward
from .batch_snapshot import BatchSnapshot, Forwards, may_be_narrow, no_second_run
from .cures import MAX_RUNS, try_cures
from .diagnosis import Call, Diagnosis, enrich
from .experiment import Allows, Conditions, module_words, nothing_allowed
from .forward_rerun import rerun_forward
from .patching.patches import KEPT_FOR_FORMATS, MOST_FORWARDS, MOST_RUNS, try_patches
from .samples import dataset_indices, find_samples

PATCH_FILE = "cure.patch"

_T = TypeVar("_T")
_FORMS: dict[str, Callable[[Report], str]] = {
    "report.html": lambda report: report.to_html(),
    "report.json": lambda report: report.to_json(),
    "report.txt": lambda report: report.to_text(whole=True),
}


def post_mortem(
    report: Report,
    snapshot: BatchSnapshot | None,
    model: nn.Module,
    output_dir: Path | None,
    *,
    examines: bool,
    reason: str = "",
    loss_scale: float | None = None,
    allows: Allows = nothing_allowed,
    gradients: bool = False,
    call: BatchSnapshot | None = None,
) -> Report:
    """Return the report with the results of a re-run, if it `examines`, and write it to `output_dir`, if any.

    `snapshot` is None where the batch cannot be run again; a `reason` says in words why it must not be. `loss_scale` is
    that of the batch, where it is known, `allows` says which infinities are meant, and `gradients` whether
    gradients are watched. `call` is the failed module call itself, to run where the batch shows nothing.
    """
    finding = report.finding
    if finding is None:
        return report
    remarks: list[str] = []
    diagnosis: Diagnosis | None = None
    if examines and (snapshot is None or reason):
        why = reason or (
            "its outermost call lies in compiled code or in a backward, or what it was given could not be kept"
        )
        remarks.append(f"the batch was not run a second time: {why}")
    elif examines and snapshot is not None and finding.phase != "step":
        snapshot = replace(snapshot, forwards=Forwards())
        conditions = Conditions(loss_scale, allows, gradients)
        finding, diagnosis = _look(finding, report.frames, snapshot, model, conditions, remarks)
        if call is not None and finding.origin == "produced" and not (diagnosis and diagnosis.operation):
            remarks.append(
                f"{module_words(finding.module)} was run alone, with what the failed call was given"
            )
            finding, diagnosis = _look(finding, report.frames, call, model, conditions, remarks)
        elif diagnosis is not None:
            finding = _sampled(finding, diagnosis, snapshot, model, allows, remarks)
    finding = replace(finding, remarks=(*finding.remarks, *remarks))
    if output_dir is None:
        return replace(report, finding=finding)
    return _write(report, finding, diagnosis, snapshot, output_dir)


def _look(
    finding: Finding,
    frames: Sequence[Frame],
    snapshot: BatchSnapshot,
    model: nn.Module,
    conditions: Conditions,
    remarks: list[str],
) -> tuple[Finding, Diagnosis | None]:
    """Return the finding with the results of a re-run, and with the cures where it failed again."""
    if finding.phase == "backward":
        seen = rerun_backward(snapshot, finding, frames, model=model, conditions=conditions)
        return enrich(finding, seen), seen
    diagnosis = _attempt("the closer look", lambda: rerun_forward(snapshot, finding, model=model), remarks)
    if diagnosis is None:
        return finding, None
    closer = enrich(finding, diagnosis)
    if diagnosis.transient is False or (finding.origin in ("data", "buffer") and diagnosis.place):
        if doubts := snapshot.doubts():
            remarks.append(f"no cure was tried, as {doubts[0]}")
        else:
            closer = _cured(closer, diagnosis, snapshot, model, conditions, remarks)
    return closer, diagnosis


def _cured(
    finding: Finding,
    diagnosis: Diagnosis,
    snapshot: BatchSnapshot,
    model: nn.Module,
    conditions: Conditions,
    remarks: list[str],
) -> Finding:
    """Return the finding with the cures that were tried: changes of the source first, as they are the smallest."""
    is_narrow = may_be_narrow(snapshot, finding)
    most = MOST_RUNS - (KEPT_FOR_FORMATS if is_narrow else 1)
    found = try_patches(snapshot, finding, model, diagnosis.place, most_runs=most, conditions=conditions)
    cures, more = found.cures, found.remarks
    if is_narrow or not cures:
        most = min(MAX_RUNS, MOST_RUNS - found.runs)
        tried = _attempt(
            "trying cures",
            lambda: try_cures(snapshot, finding, model, conditions=conditions, most_runs=most),
            remarks,
        )
        if tried is not None:
            cures, more = [*cures, *tried[0]], [*more, *tried[1]]
    return replace(finding, cures=working_first(cures), remarks=(*finding.remarks, *more))


def _sampled(
    finding: Finding,
    diagnosis: Diagnosis,
    snapshot: BatchSnapshot,
    model: nn.Module,
    allows: Allows,
    remarks: list[str],
) -> Finding:
    """Return the finding with the samples that carry the failure, if the remaining forwards show them."""
    made = 0 if snapshot.forwards is None else snapshot.forwards.made
    if not diagnosis.rows or diagnosis.transient or no_second_run(snapshot.module) or snapshot.doubts():
        return finding
    samples = _attempt(
        "the search for samples",
        lambda: find_samples(
            snapshot,
            module_names(model),
            diagnosis.rows,
            MOST_FORWARDS - made,
            allows=allows,
            start=diagnosis.start,
        ),
        remarks,
    )
    if not samples:
        return finding
    indices = dataset_indices(snapshot, samples)
    return replace(finding, samples=samples, remarks=(*finding.remarks, *([indices] if indices else ())))


def _attempt(what: str, step: Callable[[], _T], remarks: list[str]) -> _T | None:
    try:
        return step()
    except Exception as error:
        remarks.append(f"{what} failed: {spell(error)}")
        return None


def _write(
    report: Report,
    finding: Finding,
    diagnosis: Diagnosis | None,
    snapshot: BatchSnapshot | None,
    output_dir: Path,
) -> Report:
    remarks: list[str] = []
    folder = _attempt("making the folder", lambda: _new_folder(output_dir, finding), remarks)
    if folder is None:
        return _told(report, finding, remarks)
    files: list[str] = []
    call = None if diagnosis is None else diagnosis.call
    if call is None or snapshot is None:
        is_forward = finding.phase == "forward"
        why = (
            "no call was seen to make the value a second time"
            if is_forward
            else "a capsule replays a forward"
        )
        remarks.append(f"no capsule was written: {why}")
    elif made := _attempt(
        "writing the capsule", lambda: _write_capsule(folder, call, snapshot, finding, report.rank), remarks
    ):
        files.append(str(made))
    patch = next((cure.patch for cure in finding.cures if cure.works and cure.patch), "")
    if patch and (
        made := _attempt(f"writing {PATCH_FILE}", lambda: _write_whole(folder / PATCH_FILE, patch), remarks)
    ):
        files.append(str(made))
    return _write_forms(report, finding, folder, _FORMS, files, remarks)


def _write_capsule(
    folder: Path, call: Call, snapshot: BatchSnapshot, finding: Finding | None, rank: int
) -> Path:
    return write_capsule(
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


def _write_forms(
    report: Report,
    finding: Finding,
    folder: Path,
    names: Iterable[str],
    files: list[str],
    remarks: list[str],
) -> Report:
    """Write the forms of the report, each naming all files; again, should one of them not be written after all."""
    paths = [folder / name for name in names]
    told = _told(report, finding, remarks, [*files, *map(str, paths)])
    troubles = list(remarks)
    written = [path.name for path in paths if _written(path, told, troubles)]
    if len(written) == len(paths):
        return told
    return _write_forms(report, finding, folder, written, files, troubles)


def _told(report: Report, finding: Finding, remarks: list[str], files: Iterable[str] = ()) -> Report:
    told = replace(finding, files=tuple(files), remarks=(*finding.remarks, *remarks))
    return replace(report, finding=told)


def _written(path: Path, report: Report, remarks: list[str]) -> bool:
    form = _FORMS[path.name]
    done = _attempt(f"writing {path.name}", lambda: _write_whole(path, form(report)), remarks)
    return done is not None


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
    made = make_numbered(folder, lambda one: one.mkdir(parents=True))
    for name in ("report.json", "report.txt"):
        _write_whole(made / name, _FORMS[name](report))
    return made


def write_spike(
    report: SpikeReport, start: BatchSnapshot | None, model: nn.Module | None, output_dir: Path
) -> SpikeReport:
    """Write the report and a capsule of its batch, as far as that can be done. Return it with files and remarks."""
    remarks: list[str] = []
    folder = _attempt("making the folder", lambda: _new_folder(output_dir, report, "spike-batch"), remarks)
    if folder is None:
        return replace(report, remarks=tuple(remarks))
    files: list[str] = []
    name = None if start is None or model is None else module_names(model).get(start.module)
    if start is None or name is None:
        remarks.append("no capsule was written: the start of the batch was not kept")
    else:
        call = Call(name, start.module, start.args, start.kwargs)
        made = _attempt(
            "writing the capsule", lambda: _write_capsule(folder, call, start, None, report.rank), remarks
        )
        files += [] if made is None else [str(made)]
    forms = {"html": report.to_html, "json": report.to_json, "txt": report.to_text}
    for ending, form in forms.items():
        path = folder / f"report.{ending}"
        done = _attempt(f"writing {path.name}", functools.partial(_write_form, path, form), remarks)
        files += [] if done is None else [str(done)]
    return replace(report, files=tuple(files), remarks=tuple(remarks))


def _write_form(path: Path, form: Callable[[], str]) -> Path:
    return _write_whole(path, form())


def _new_folder(output_dir: Path, finding: Finding | SpikeReport, kind: str = "batch") -> Path:
    name = f"{kind}-{finding.batch}" + (f"-rank-{finding.rank}" if finding.rank else "")
    return make_numbered(output_dir / name, lambda folder: folder.mkdir(parents=True))
