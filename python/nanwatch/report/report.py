"""Frames and the finding, and their forms: text, JSON, HTML, and the exceptions of a watched model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ..util import reading
from ..util.job import Attempt, current_attempt, rank, read_attempt
from ..util.progress import Tell, silent, wants_color
from ..util.visible import suppressed
from . import text
from .finding import Finding, read_finding
from .record import Frame
from .suspect import Suspect

if TYPE_CHECKING:
    from .rank_observation import Origin

SCHEMA = "nanwatch.report"
VERSION = 1
_OFTEN_EMPTY = ("never_called", "suspects")  # left out of JSON when they are


@dataclass(frozen=True, slots=True)
class Report:
    """Frames and finding of a watch.

    `frames` come oldest first. `finding` is None when all is finite. `batch` is the latest number, None before the
    first batch, and `rank` that of the process. `parameter_mesh` is the position of this rank in the device meshes over
    which the model's parameters are sharded, also while they are gathered. `mesh` adds the meshes of tensors in the
    frames. `attempt` is the start of a torchrun job to which the report belongs, None without torchrun. `never_called`
    are modules that nobody called, though their weights took part in the training. `suspects`, in the report of a
    failure, are weights that grew much or are far from their siblings.

    Examples:
        >>> import nanwatch, pathlib, torch
        >>> model = torch.nn.LayerNorm(2, eps=0.0)
        >>> with nanwatch.watch(model, on_nonfinite="record") as watch:
        ...     output = model(torch.zeros(1, 2))
        >>> report = watch.report()
        >>> report.print()
        Detected nan in batch 0
        Last 1 frames, the oldest first:
        abs min  abs max  metadata
                           LayerNorm
        1.00e+00 1.00e+00 weight
        0.00e+00 0.00e+00 bias
        0.00e+00 0.00e+00 input[0]
             nan      nan output  <-- nan, first
        <BLANKLINE>
        What:  nan first seen in `output` of the root module (LayerNorm) in batch 0.
        Where: all 2 elements, the first at [0, 0]; float32 of shape [1, 2].
        Why:   this module made it: its weights, buffers and inputs that were read are all finite.
        Under: all of `input[0]` is zero.
        Next:  look at the inputs and weights of this module in its frame above.
        >>> report.to_text() == str(report)
        True
        >>> size = pathlib.Path("report.html").write_text(report.to_html(), encoding="utf-8")
        >>> nanwatch.Report.from_json(report.to_json()).finding.label
        'output'
    """

    frames: tuple[Frame, ...]
    finding: Finding | None
    batch: int | None
    rank: int = 0
    parameter_mesh: tuple[str, ...] = ()
    attempt: Attempt | None = None
    never_called: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()

    @property
    def mesh(self) -> tuple[str, ...]:
        """Return the position of this rank in the device meshes of parameters and frames' tensors, as `dp=1 of 4`."""
        return tuple(dict.fromkeys((*self.parameter_mesh, *text.mesh_coordinates(self.frames))))

    def to_text(self, color: bool = False, *, whole: bool = False) -> str:
        """Return the frames in columns and the finding in words; with ANSI colours for `color`, which needs `rich`.

        With a finding the text fits a screen of forty lines: it shows the frames closest to the finding. `whole` shows
        all of `frames`.
        """
        told = self._told()
        return text.report_text(
            self.frames, self.finding, self.batch, self.mesh, told, color=color, whole=whole
        )

    def __str__(self) -> str:
        return self.to_text()

    def print(self, file: TextIO | None = None) -> None:
        """Write the text to `file` (sys.stdout), in colour where that is a terminal and `rich` is installed."""
        out = sys.stdout if file is None else file
        out.write(f"{self.to_text(color=wants_color(out))}\n")

    def to_json(self) -> str:
        """Return one strict JSON document; nan and the infinities are the strings "nan", "inf" and "-inf"."""
        own = {
            name: value for name, value in reading.plain(self).items() if value or name not in _OFTEN_EMPTY
        }
        document = {"schema": SCHEMA, "version": VERSION, **own}
        return json.dumps(document, allow_nan=False)

    def to_html(self, tell: Tell = silent) -> str:
        """Return a page that opens offline and sends nothing: the finding, a chart, headroom by module, every record.

        Write it as UTF-8. Needs `jinja2` and `plotly`: raises ImportError, naming the extra, without them.
        """
        from .html import report_html

        return report_html(self.frames, self.finding, self.batch, self.rank, self.mesh, tell, self._told())

    def _told(self) -> list[str]:
        return [
            *text.never_called_lines(self.never_called),
            *(line for one in self.suspects for line in one.lines()),
        ]

    @classmethod
    def from_json(cls, document: str) -> Report:
        """Return the report that `to_json` wrote. Raise ValueError with the place for anything else."""
        advice = "pass the whole text that Report.to_json() wrote"
        return reading.document(document, _report, "a nanwatch report", advice)


def report_of(
    frames: tuple[Frame, ...],
    finding: Finding | None = None,
    batch: int | None = None,
    parameter_mesh: tuple[str, ...] = (),
    never_called: tuple[str, ...] = (),
    suspects: tuple[Suspect, ...] = (),
) -> Report:
    """Return a report of this process, with its rank and its attempt in the job."""
    return Report(frames, finding, batch, rank(), parameter_mesh, current_attempt(), never_called, suspects)


# Reading back.


_REPORT: dict[str, reading.Reader[Any]] = {
    "schema": reading.one_of((SCHEMA,)),
    "version": reading.one_of((VERSION,)),
    "frames": reading.tuple_of(reading.of(Frame)),
    "finding": reading.optional(read_finding),
    "batch": reading.optional(reading.count),
    "rank": reading.count,
    "parameter_mesh": reading.tuple_of(reading.text),
    "attempt": reading.optional(read_attempt),
    "never_called": reading.tuple_of(reading.text),
    "suspects": reading.tuple_of(reading.of(Suspect)),
}


def _report(document: Any) -> Report:
    if isinstance(document, dict) and document.get("schema") == SCHEMA and document.get("version") != VERSION:
        raise ValueError(f"its version is {document.get('version')!r}, this nanwatch reads version {VERSION}")
    added: dict[str, Any] = {"parameter_mesh": (), "attempt": None, **dict.fromkeys(_OFTEN_EMPTY, ())}
    found = reading.members(document, "report", _REPORT, added=added)
    return Report(**{name: value for name, value in found.items() if name not in ("schema", "version")})


class NonFiniteError(ValueError):
    """A watched module call held a nan or an inf. `.report` has the frames that led to it and the finding.

    In a job of several ranks `.origin` says on which of them it was first. In a job of one it is None.

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

    def __init__(self, report: Report, origin: Origin | None = None) -> None:
        super().__init__(report, origin)
        self.report = report
        self.origin = origin

    def __str__(self) -> str:
        return _told(self.report, self.origin)


def add_note(error: BaseException, report: Report) -> None:
    """Add what was not finite to somebody else's exception, as a note under its traceback (PEP 678). Raises nothing."""
    note = f"nanwatch: {_told(report)}"
    try:
        if sys.version_info >= (3, 11):
            error.add_note(note)
        else:  # Python shows none, but pytest and others do
            vars(error).setdefault("__notes__", []).append(note)
    except Exception:  # a class of exceptions may have an `add_note` of its own
        suppressed("an exception of the user's took no note")


def _told(report: Report, origin: Origin | None = None) -> str:
    head = "a non-finite value" if report.finding is None else text.summary(report.finding)
    if origin is not None:
        head += f"\nAmong the ranks: {origin}"
    return f"{head}\n\n{report.to_text()}"


class BatchLimitError(ValueError):
    """The batch after which the run should end is done. `.batch` is its number.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, abort_after_batch=0):
        ...     try:
        ...         model(torch.ones(2))
        ...     except nanwatch.BatchLimitError as error:
        ...         print(error)
        stopped after batch 0, as abort_after_batch=0 asks; leave the option out to run on
    """

    def __init__(self, batch: int, option: str) -> None:
        super().__init__(batch, option)
        self.batch = batch
        self.option = option

    def __str__(self) -> str:
        asked = f"{self.option}={self.batch}"
        return f"stopped after batch {self.batch}, as {asked} asks; leave the option out to run on"
