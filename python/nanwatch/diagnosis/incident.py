"""Incident: a failure from its first non-finite value to the exception, what is known of it by now, and its folder.

A folder below `output_dir` has text, JSON, page, patch and capsule, of a spike too. What cannot be written is a remark
in what can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..capsule.capsule import Capsule, make_numbered, write_capsule
from ..instrumentation.wrapped_names import module_names
from ..report.events import SpikeReport
from ..report.finding import Finding
from ..report.report import FORMS, NonFiniteError, Report
from ..util.messages import first_few, spell
from .batch_snapshot import BatchSnapshot

PATCH_FILE = "cure.patch"
_MAKE = partial(Path.mkdir, parents=True)

_T = TypeVar("_T")
_AReport = TypeVar("_AReport", Report, SpikeReport)


@dataclass(slots=True, eq=False)
class Incident:
    """A failure, which is seen, told to the other ranks, examined, written and raised, in this order.

    `report` is what is known by now. Each new fact replaces it, so that a report which was handed out stays as it was.
    `raised` is the error that was raised inside its forward, until that is left.
    """

    report: Report
    raised: NonFiniteError | None = None

    @property
    def finding(self) -> Finding:
        """The finding as it is known by now."""
        finding = self.report.finding
        assert finding is not None, "a failure has a finding"
        return finding

    @finding.setter
    def finding(self, finding: Finding) -> None:
        self.report = replace(self.report, finding=finding)

    def learn(self, **facts: Any) -> None:
        """Set these fields of the finding."""
        self.finding = replace(self.finding, **facts)

    def remark(self, *remarks: str) -> None:
        """Add these remarks to the finding."""
        self.learn(remarks=(*self.finding.remarks, *remarks))


def attempt(what: str, step: Callable[[], _T], remark: Callable[[str], object]) -> _T | None:
    """Return the result of the step, or None with a remark where it raised."""
    try:
        return step()
    except Exception as error:
        remark(f"{what} failed: {spell(error)}")
        return None


def write_failure(incident: Incident, call: BatchSnapshot | None, output_dir: Path) -> None:
    """Write the report of a failure in its forms, a capsule and a patch, and note the files in the report."""
    finding, why = incident.finding, "a capsule replays a forward"
    why = "no call was seen to make the value a second time" if finding.phase == "forward" else why
    incident.report = _write_folder(output_dir / f"batch-{finding.batch}", incident.report, call, why)


def write_spike(
    report: SpikeReport, start: BatchSnapshot | None, model: nn.Module | None, output_dir: Path
) -> SpikeReport:
    """Write the report and a capsule of its batch, as far as that can be done. Return it with files and remarks."""
    name = None if start is None or model is None else module_names(model).get(start.module)
    call = None if start is None or name is None else replace(start, name=name)
    folder = output_dir / f"spike-batch-{report.batch}"
    return _write_folder(folder, report, call, "the start of the batch was not kept")


def _write_folder(path: Path, report: _AReport, call: BatchSnapshot | None, why: str) -> _AReport:
    """Write a report with a capsule of the call and a patch into a new folder. Return the report.

    The report that is returned names the files, and has remarks on what could not be written. `why` says why there is
    no call.
    """
    files, remarks = list[str](), list[str]()
    finding = report.finding if isinstance(report, Report) else None
    path = path.with_name(f"{path.name}-rank-{report.rank}") if report.rank else path
    folder = attempt("making the folder", partial(make_numbered, path, _MAKE), remarks.append)
    if folder is None:
        return _with_files(report, files, remarks)

    def write(name: str, make: Callable[[], Path]) -> None:
        if (made := attempt(f"writing {name}", make, remarks.append)) is not None:
            files.append(str(made))

    def capsule(call: BatchSnapshot) -> Path:
        given = folder / "capsule", call.module, call.name, call.args, call.kwargs
        modes: Any = {"rng": call.rng, "autocast": call.autocast}
        made = write_capsule(*given, finding=finding, rank=report.rank, **modes)
        if missing := [text.partition(": ")[0] for text in Capsule.open(made).left_out]:
            remarks.append(f"the capsule leaves out {first_few(missing)}; its list left_out says why")
        return made

    if call is None:
        remarks.append(f"no capsule was written: {why}")
    else:
        write("the capsule", partial(capsule, call))
    patches: list[str] = [] if finding is None else [cure.patch for cure in finding.cures if cure.works]
    if patch := next(filter(None, patches), ""):
        write(PATCH_FILE, partial(_write_whole, folder / PATCH_FILE, lambda: patch))
    # The page, which needs a package, comes first, so that the others do not name it where it is missing.
    forms = sorted((form for form in FORMS.values() if form.in_folder), key=lambda form: form.name)
    paths = [folder / f"report.{form.suffix}" for form in forms]
    for i, form in enumerate(forms):
        all_files = files + [str(place) for place in paths[i:]]
        complete: _AReport = _with_files(report, all_files, remarks)
        write(paths[i].name, partial(_write_whole, paths[i], partial(form.render, complete)))
    return _with_files(report, files, remarks)


def _with_files(report: _AReport, files: Sequence[str], remarks: Sequence[str]) -> _AReport:
    if isinstance(report, SpikeReport):
        return replace(report, files=tuple(files), remarks=tuple(remarks))
    incident = Incident(report)
    incident.learn(files=tuple(files))
    incident.remark(*remarks)
    return incident.report


def write_frames(report: Report, folder: Path) -> None:
    """Write a report without a finding, as JSON and text, into the folder, which has a number where that is taken.

    No page: of thousands of ranks most have nothing to show. Raises what writing raises.
    """
    made = make_numbered(folder, _MAKE)
    for form in FORMS["json"], FORMS["text"]:
        _write_whole(made / f"report.{form.suffix}", partial(form.render, report))


def _write_whole(path: Path, render: Callable[[], str]) -> Path:
    """Write the whole text, or leave no file of this name: a launcher may end this process meanwhile."""
    under_way = path.with_name(f".{path.name}.tmp")
    try:
        under_way.write_text(render(), encoding="utf-8")
        return under_way.replace(path)
    finally:
        under_way.unlink(missing_ok=True)
