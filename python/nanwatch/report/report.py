"""Report: frames, the finding and suspects; the exceptions of a watched model; and the forms of all reports.

A form is an entry of FORMS: text, JSON, a page, and SARIF for editors and code hosts. `nanwatch show --format` takes
its name, and `output_dir` gets those that are `in_folder`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, TextIO, TypeAlias
from urllib.parse import quote

from .._version import __version__
from ..records.fields import body_of, parsed, plain, read
from ..records.record import CAPTURED, Frame
from ..util.job import Attempt, current_attempt, rank
from ..util.messages import color_console, first_few, module_name, suppressing, visible
from . import text
from .events import SPIKE_SCHEMA, SpikeReport, Suspect, read_spike
from .finding import Finding, Origin, Place
from .finding_text import Explanation, explain
from .page import InNotebook, report_html

SCHEMA = "nanwatch.report"
VERSION = 2
_OFTEN_EMPTY = {"never_called": (), "suspects": (), "origin": None}  # left out of JSON when they are


@dataclass(frozen=True, slots=True)
class Report(InNotebook):
    """Frames and finding of a watch.

    `frames` come oldest first. `finding` is None when all is finite. `batch` is the latest number, None before the
    first batch, and `rank` that of the process. `parameter_mesh` is the position of this rank in the device meshes over
    which the model's parameters are sharded, also while they are gathered. `attempt` is the start of a torchrun job to
    which the report belongs, None without torchrun. Rank and attempt default to those of this process. `never_called`
    are modules that nobody called, though their weights took part in the training. `suspects`, in the report of a
    failure, are weights that grew much or are far from their siblings. `origin`, in a job of several ranks, says where
    the ranks agreed that the first non-finite value was; None where they have not.

    Examples:
        >>> import nanwatch, pathlib, torch
        >>> model = torch.nn.LayerNorm(2, eps=0.0)
        >>> with nanwatch.watch(model, on_nonfinite="record") as watch:
        ...     output = model(torch.zeros(1, 2))
        >>> report = watch.report()
        >>> report.print()
        Detected nan in batch 0
        Last frame:
        abs min  abs max  metadata
                           LayerNorm
        1.00e+00 1.00e+00 weight
        0.00e+00 0.00e+00 bias
        0.00e+00 0.00e+00 input[0]
             nan      nan output  <-- nan, first
        <BLANKLINE>
        What:  nan first seen in `output` of the root module (LayerNorm) in batch 0.
        Where: all 2 elements; float32 of shape [1, 2].
        Why:   this module made it: its weights, buffers and inputs that were read are all finite.
        Under: all of `input[0]` is zero.
        Next:  look at the inputs and weights of this module in its frame.
        Note:  no re-run was made, as the run goes on: rerun=True (--rerun) finds the operation.
        >>> report.to_text() == str(report)
        True
        >>> size = pathlib.Path("report.html").write_text(report.to_html(), encoding="utf-8")
        >>> nanwatch.Report.from_json(report.to_json()).finding.label
        'output'
    """

    frames: tuple[Frame, ...]
    finding: Finding | None
    batch: int | None
    rank: int = field(default_factory=rank)
    parameter_mesh: tuple[str, ...] = ()
    attempt: Attempt | None = field(default_factory=current_attempt)
    never_called: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    origin: Origin | None = None

    def __eq__(self, other: object) -> bool:
        # By their text, in which a nan equals another nan.
        return self.to_json() == other.to_json() if isinstance(other, Report) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.batch, self.rank, len(self.frames)))

    @property
    def explanation(self) -> Explanation | None:
        """The reason and the advice as codes with values, or None when all is finite."""
        if self.finding is None:
            return None
        return explain(self.finding, *text.culprit(self.finding, self.frames), self.frames)

    def to_text(self, color: bool = False, *, whole: bool = False) -> str:
        """Return the frames in columns and the finding in words; with ANSI colours for `color`.

        With a finding the text fits a screen of forty lines: it shows the frames closest to the finding. `whole` shows
        all of `frames`.
        """
        lines = [(style, visible(line)) for style, line in _styled_lines(self, whole=whole)]
        return "\n".join(f"\x1b[{_COLORS[style]}m{line}\x1b[0m" if color else line for style, line in lines)

    def print(self, file: TextIO | None = None) -> None:
        """Write the text to `file` (sys.stdout), in colour where that is a terminal and `rich` is installed."""
        out = sys.stdout if file is None else file
        out.write(f"{self.to_text(color=color_console(out) is not None)}\n")

    def to_json(self) -> str:
        """Return one strict JSON document; nan and the infinities are the strings "nan", "inf" and "-inf"."""
        members = {name: value for name, value in plain(self).items() if value or name not in _OFTEN_EMPTY}
        document = {"schema": SCHEMA, "version": VERSION, **members}
        if self.explanation is not None:
            document["explanation"] = plain(self.explanation)
        return json.dumps(document, allow_nan=False)

    def to_html(self) -> str:
        """Return a page that opens offline and sends nothing: the finding, a chart, headroom by module, every record.

        Write it as UTF-8. Needs `jinja2`: raises ImportError, naming the extra, without it.
        """
        _, headline = next(_styled_lines(self))  # which knows when nothing was read
        suspicions = _suspicion_lines(self)
        where = [] if self.batch is None else [f"batch {self.batch}"]
        where.append(", ".join([f"rank {self.rank}", *self.parameter_mesh]))
        return report_html(self.frames, self.finding, where, headline, suspicions)

    @classmethod
    def from_json(cls, document: str) -> Report:
        """Return the report that `to_json` wrote. Raise ValueError with the place for anything else."""
        return parsed(document, _read_report, "a nanwatch report")


class NonFiniteError(ValueError):
    """A watched module call held a nan or an inf. `.report` has the frames that led to it and the finding.

    In a job of several ranks `.origin` says on which of them it was first. In a job of one it is None.

    A pickle carries the report to another process. A channel that carries only text, such as that of a DataLoader's
    workers, makes the error again from its text: `str()` of it tells the finding, and `.report` is empty.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.LayerNorm(2, eps=0.0)
        >>> with nanwatch.watch(model):
        ...     try:
        ...         model(torch.zeros(1, 2))
        ...     except nanwatch.NonFiniteError as error:
        ...         print(error.report.finding.value, error.report.finding.origin, error.origin)
        nan produced None
    """

    def __init__(self, report: Report | str, origin: Origin | None = None) -> None:
        super().__init__(report, origin)
        self.report = Report((), None, None) if isinstance(report, str) else report
        self.origin = origin

    def __str__(self) -> str:
        return self.args[0] if isinstance(self.args[0], str) else self._message()

    def _message(self) -> str:
        return _message(self.report, self.origin)


def add_note(error: BaseException, report: Report) -> None:
    """Add the report to a user's exception, as a note below its traceback (PEP 678). Raises nothing."""
    note = f"nanwatch: {_message(report)}"
    with suppressing("a user's exception took no note"):  # its class may have an `add_note` of its own
        if sys.version_info >= (3, 11):
            error.add_note(note)
        else:  # Python shows none, but pytest and others do
            vars(error).setdefault("__notes__", []).append(note)


def _message(report: Report, origin: Origin | None = None) -> str:
    head = "a non-finite value" if report.finding is None else text.summary(report.finding)
    if origin is not None and report.origin is None:
        head += f"\nAmong the ranks: {origin}"
    return f"{head}\n\n{report.to_text()}"


class BatchLimitError(ValueError):
    """The batch after which the run should end is done. `.batch` is its number.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.ReLU()
        >>> debug = nanwatch.DebugUnderflowOverflow(model, abort_after_batch_num=0)
        >>> try:
        ...     model(torch.ones(2))
        ... except ValueError as error:
        ...     print(error)
        stopped after batch 0, as abort_after_batch_num=0 asks; leave the option out to run on
        >>> debug.stop()
    """

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.batch = batch

    def __str__(self) -> str:
        asked = f"abort_after_batch_num={self.batch}"
        return f"stopped after batch {self.batch}, as {asked} asks; leave the option out to run on"


# Forms.

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
        words = f"{text.summary(finding)}. Why: {explanation.reason}{cure} Next: {explanation.advice}"
    rule = code.replace(" ", "-").replace("'", "")
    return Annotation(rule, level, visible(words), module_name(module), place)


def _text(report: AnyReport) -> str:
    return report.to_text(whole=True) if isinstance(report, Report) else report.to_text()


def _sarif(report: AnyReport) -> str:
    results = []
    if (annotation := annotation_of(report)) is not None:
        rule, level, words, module, place = annotation
        location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": module, "kind": "module"}]}
        if place is not None:
            path = PurePath(place.file)
            uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
            # Leave out the columns: a Place counts bytes, SARIF counts characters.
            region = {"startLine": place.line}
            location["physicalLocation"] = {"artifactLocation": {"uri": uri}, "region": region}
        message = {"text": words}
        results = [{"ruleId": rule, "level": level, "message": message, "locations": [location]}]
    rules = [{"id": result["ruleId"]} for result in results]
    driver = {"name": "nanwatch", "version": __version__, "rules": rules}
    runs = [{"tool": {"driver": driver}, "results": results}]
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": runs}, allow_nan=False, indent=1)


FORMS = {
    form.name: form
    for form in (
        Form("text", "txt", _text),
        Form("json", "json", lambda report: report.to_json()),
        Form("html", "html", lambda report: report.to_html()),
        Form("sarif", "sarif", _sarif, in_folder=False),
    )
}


def read_saved(document: str) -> AnyReport:
    """Return the report of a failure or of a spike from its JSON. Raise ValueError with the place for anything else."""

    def read_either(members: Any) -> AnyReport:
        is_spike = isinstance(members, dict) and members.get("schema") == SPIKE_SCHEMA
        return read_spike(members) if is_spike else _read_report(members)

    return parsed(document, read_either, "a nanwatch report")


def _read_report(document: Any) -> Report:
    members = body_of(document, SCHEMA, VERSION)
    members.pop("explanation", None)  # which follows from the others
    report: Report = read(Report, members, "report")
    return report


# Lines of the text.

_MOST_LINES = 39  # of a report with a finding: one screen
_HEADER = 3

Style: TypeAlias = Literal["plain", "head", "module", "quiet", "nonfinite"]
# Parameters of the escape sequence for each style: normal, bold, cyan, dim, and bold red.
_COLORS: dict[Style, str] = {"plain": "0", "head": "1", "module": "36", "quiet": "2", "nonfinite": "1;31"}
_MOST_NAMED = 5


def _suspicion_lines(report: Report) -> list[str]:
    """Return the lines on modules that nobody called, on suspect weights, and on CUDA graphs."""
    lines = [str(fact) for suspect in report.suspects for fact in suspect.facts()]
    if names := report.never_called:
        named = first_few([*map(module_name, names)], _MOST_NAMED)
        seen = "What they compute is seen only where a watched module receives it."
        lines.insert(0, f"Never called as modules, though their weights are trained: {named}. {seen}")
    notes = (record.note for frame in report.frames for record in frame.records)
    if any(note is not None and note.text == CAPTURED for note in notes):
        lines.append("Calls were captured into a CUDA graph: its replays are not seen.")
    return lines


def _styled_lines(report: Report, *, whole: bool = False) -> Iterator[tuple[Style, str]]:
    """Yield the lines of a report, each with its style.

    A report with a finding has fewer than forty lines, because it leaves out the frames that are far from the finding.
    `whole` keeps all frames.
    """
    frames: Sequence[Frame] = report.frames
    finding = report.finding
    until = "" if report.batch is None else f" up to batch {report.batch}"
    if finding is not None:
        yield "head", f"Detected {finding.value} in batch {finding.batch}"
        if report.origin is not None:
            yield "plain", f"Among the ranks: {report.origin}"
    elif not frames:
        yield "head", f"Nothing was looked at{until}: no watched call has run."
        return
    elif not any(record.isfinite is not None for frame in frames for record in frame.records):
        yield "head", f"Nothing could be read{until}: no record of the frames below has a range."
    else:
        records = [(frame.batch, record) for frame in frames for record in frame.records]
        notes = [(batch, record.role, record.note) for batch, record in records if record.note is not None]
        skipped = dict.fromkeys((batch, note) for batch, _, note in notes if note.kind == "skipped_step")
        is_partial = any(role == "output" and note.kind == "not_checked" for _, role, note in notes)
        head = "All that was read is finite" if is_partial else "All finite"
        yield "head", f"{head}{until}" + (" but for gradients that no step took" if skipped else "")
        for number, note in skipped:
            yield "plain", f"Batch {number}: {note}."
    if report.parameter_mesh:
        yield "plain", f"This rank in the device mesh: {', '.join(report.parameter_mesh)}."
    source, culprit = (None, None) if finding is None else text.culprit(finding, frames)
    ending = [] if finding is None else text.finding_lines(finding, frames)
    ending += _suspicion_lines(report)
    ending = [""] * bool(ending) + ending
    count = len(frames)
    if finding is not None and not whole:
        room = _MOST_LINES - _HEADER - bool(report.parameter_mesh) - (report.origin is not None)
        frames = _closest(frames, source, room - len(ending))
    which = f"Last {count} frames" if len(frames) == count else f"{len(frames)} of the last {count} frames"
    yield "plain", "Last frame:" if count == 1 else f"{which}, the oldest first:"
    yield "quiet", text.COLUMNS
    for before, frame in zip([*frames[:1], *frames], frames, strict=False):
        if frame.batch != before.batch:
            yield "quiet", f"{text.PREFIX} *** Starting batch number={frame.batch} ***"
        words = ", ".join(text.frame_words(frame))
        yield "module", text.frame_line(frame.name, frame.class_name) + (f" ({words})" if words else "")
        for record in frame.records:
            line = text.record_line(record)
            if finding is not None and record is culprit:
                yield "nonfinite", f"{line}  <-- {finding.value}, first"
            else:
                yield ("quiet" if record.abs_max is None else "plain"), line
    for line in ending:
        yield "plain", line


def _closest(frames: Sequence[Frame], source: Frame | None, room: int) -> Sequence[Frame]:
    """Return `source` with as many of the frames before it as fit into `room` lines, and then of those after it."""
    first = last = next((i for i, frame in enumerate(frames) if frame is source), len(frames) - 1)
    used = _height(frames, last, last) if frames else 0
    while first > 0 and (more := used + _height(frames, first - 1, first)) <= room:
        first, used = first - 1, more
    while last + 1 < len(frames) and (more := used + _height(frames, last + 1, last)) <= room:
        last, used = last + 1, more
    return frames[first : last + 1]


def _height(frames: Sequence[Frame], i: int, beside: int) -> int:
    """Return how many lines the frame takes, with the line between its batch and that of the frame beside it."""
    return 1 + len(frames[i].records) + (frames[i].batch != frames[beside].batch)
