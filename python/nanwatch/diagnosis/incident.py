"""Incident: a failure from its first non-finite value to the exception, what is known of it by now, and its folder.

A folder below `output_dir` has text, JSON, page, patch and capsule, of a spike too. What cannot be written is a remark
in what can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..capsule.capsule import Capsule, make_numbered, write_capsule
from ..instrumentation.wrapped_names import module_names
from ..report.finding import Finding
from ..report.forms import FORMS, AnyReport, Form
from ..report.report import NonFiniteError, Report
from ..report.spike import SpikeReport
from ..util.visible import first_few, spell
from .batch_snapshot import BatchSnapshot
from .diagnosis import Diagnosis, ModuleCall

PATCH_FILE = "cure.patch"

_T = TypeVar("_T")
_AReport = TypeVar("_AReport", Report, SpikeReport)


@dataclass(slots=True, eq=False)
class Incident:
    """A failure, which is seen, told to the other ranks, examined, written and raised, in this order.

    `report` is what is known by now. Each new fact replaces it, so that a report which was handed out stays as it was.
    `raised` is the error that was raised inside the forward. `is_finished`: the incident was raised or handed over.
    """

    report: Report
    raised: NonFiniteError | None = None
    is_finished: bool = False

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

    def let_go(self) -> None:
        """Keep nothing of the batch but the report."""
        self.raised = None


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
    finding = incident.finding
    folder = _Folder(output_dir, f"batch-{finding.batch}", incident.report.rank)
    call = None if diagnosis is None else diagnosis.call
    if call is None or snapshot is None:
        unseen = "no call was seen to make the value a second time"
        why = unseen if finding.phase == "forward" else "a capsule replays a forward"
        folder.remarks.append(f"no capsule was written: {why}")
    else:
        folder.capsule(call, snapshot, finding)
    if patch := next((cure.patch for cure in finding.cures if cure.works and cure.patch), ""):
        folder.write(PATCH_FILE, lambda path: _write_whole(path / PATCH_FILE, patch))

    def report() -> Report:
        incident.learn(files=tuple(folder.files), remarks=(*finding.remarks, *folder.remarks))
        return incident.report

    folder.forms(report)


def write_spike(
    report: SpikeReport, start: BatchSnapshot | None, model: nn.Module | None, output_dir: Path
) -> SpikeReport:
    """Write the report and a capsule of its batch, as far as that can be done. Return it with files and remarks."""
    folder = _Folder(output_dir, f"spike-batch-{report.batch}", report.rank)
    name = None if start is None or model is None else module_names(model).get(start.module)
    if start is None or name is None:
        folder.remarks.append("no capsule was written: the start of the batch was not kept")
    else:
        folder.capsule(ModuleCall(name, start.module, start.args, start.kwargs), start, None)
    return folder.forms(lambda: replace(report, files=tuple(folder.files), remarks=tuple(folder.remarks)))


class _Folder:
    """A new folder below `output_dir`, the files that were written into it, and what could not be written."""

    def __init__(self, output_dir: Path, name: str, rank: int) -> None:
        self.files: list[str] = []
        self.remarks: list[str] = []
        self._rank = rank
        path = output_dir / (name + (f"-rank-{rank}" if rank else ""))
        self._path = attempt("making the folder", lambda: _new_folder(path), self.remarks.append)

    def write(self, what: str, write: Callable[[Path], Path]) -> None:
        """Write a file into the folder, and note its path. Without a folder do nothing."""
        if (folder := self._path) is not None:
            path = attempt(f"writing {what}", lambda: write(folder), self.remarks.append)
            self.files += [] if path is None else [str(path)]

    def capsule(self, call: ModuleCall, snapshot: BatchSnapshot, finding: Finding | None) -> None:
        """Write a capsule of the call."""
        rng, autocast = call.rng or snapshot.rng, call.autocast or snapshot.autocast
        facts: dict[str, Any] = {"finding": finding, "rank": self._rank, "rng": rng, "autocast": autocast}
        given = call.module, call.name, call.args, call.kwargs

        def write(folder: Path) -> Path:
            path = write_capsule(folder / "capsule", *given, **facts)
            if missing := [text.partition(": ")[0] for text in Capsule.open(path).left_out]:
                self.remarks.append(
                    f"the capsule leaves out {first_few(missing)}; its list left_out says why"
                )
            return path

        self.write("the capsule", write)

    def forms(self, report: Callable[[], _AReport]) -> _AReport:
        """Write the forms of what `report` returns, each of which names all files.

        The page, which needs a package, comes first, so that the others do not name it where it is missing.
        """
        if (folder := self._path) is None:
            del self.remarks[1:]  # nothing else was tried
            return report()
        before = self.files
        forms = sorted((form for form in FORMS.values() if form.in_folder), key=lambda form: form.name)
        names = [f"report.{form.suffix}" for form in forms]
        missing: set[str] = set()
        for name, form in zip(names, forms, strict=True):
            self.files = before + [str(folder / each) for each in names if each not in missing]
            complete = report()
            write = partial(_write_form, complete, form, folder)
            if attempt(f"writing {name}", write, self.remarks.append) is None:
                missing.add(name)
        self.files = before + [str(folder / each) for each in names if each not in missing]
        return report() if missing else complete


def _write_form(report: AnyReport, form: Form, folder: Path) -> Path:
    return _write_whole(folder / f"report.{form.suffix}", form.render(report))


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
        _write_form(report, FORMS[name], made)
    return made


def _new_folder(folder: Path) -> Path:
    return make_numbered(folder, lambda path: path.mkdir(parents=True))
