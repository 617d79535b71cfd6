"""Frames and the finding, and their forms: text, JSON and HTML."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from ..util import reading
from ..util.progress import Tell, silent, wants_color
from . import text
from .attempt import Attempt, read_attempt
from .finding import Cure, Finding
from .frame import Frame
from .record import Record

if TYPE_CHECKING:
    from ..numerics.ranges import TensorHealth

SCHEMA = "nanwatch.report"
VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Report:
    """What a watch saw: `frames` (oldest first), the `finding` (None when all is finite), `batch` (the latest
    number, None before the first batch) and the `rank` of the process. `parameter_mesh` is where this rank is in the
    device meshes that the model's parameters are sharded over, as `mesh` has it, also while they are gathered.
    `attempt` is the start of a torchrun job that it belongs to, None without torchrun."""

    frames: tuple[Frame, ...]
    finding: Finding | None
    batch: int | None
    rank: int = 0
    parameter_mesh: tuple[str, ...] = ()
    attempt: Attempt | None = None

    @property
    def mesh(self) -> tuple[str, ...]:
        """Where this rank is in the device meshes that the model's parameters and tensors of the frames are sharded
        over, as `dp=1 of 4`."""
        return tuple(dict.fromkeys((*self.parameter_mesh, *text.mesh_coordinates(self.frames))))

    def to_text(self, color: bool = False) -> str:
        """The frames in columns and the finding in words; ANSI colours with `color`, which needs `rich`."""
        return text.report_text(self.frames, self.finding, self.batch, self.mesh, color=color)

    def __str__(self) -> str:
        return self.to_text()

    def print(self, file: TextIO | None = None) -> None:
        """Write the text to `file` (sys.stdout), in colour where that is a terminal and `rich` is installed."""
        out = sys.stdout if file is None else file
        out.write(f"{self.to_text(color=wants_color(out))}\n")

    def to_json(self) -> str:
        """One strict JSON document; nan and the infinities are the strings "nan", "inf" and "-inf"."""
        document = {"schema": SCHEMA, "version": VERSION, **plain(self)}
        return json.dumps(document, allow_nan=False)

    def to_html(self, tell: Tell = silent) -> str:
        """One page that opens offline and sends nothing: the finding, a chart, headroom by module, every record.

        Write it as UTF-8. Needs `jinja2` and `plotly`: raises ImportError, naming the extra, without them.
        """
        from .html import report_html

        return report_html(self.frames, self.finding, self.batch, self.rank, self.mesh, tell)

    @classmethod
    def from_json(cls, document: str) -> Report:
        """The report that `to_json` wrote. Raises ValueError, saying where, for anything else."""
        advice = "pass the whole text that Report.to_json() wrote"
        return reading.document(document, _report, "a nanwatch report", advice)


def plain(value: Any) -> Any:
    """For JSON: dataclasses and named tuples as dicts, tuples as lists, nan and the infinities as strings."""
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [plain(item) for item in value]
    names = _field_names(type(value))
    return {name: plain(getattr(value, name)) for name in names} if names else value


def _field_names(kind: type) -> tuple[str, ...]:
    if hasattr(kind, "__dataclass_fields__"):
        return tuple(field.name for field in fields(kind))
    return tuple(getattr(kind, "_fields", ()))


# Reading back.


@cache
def _health_reader() -> reading.Reader[TensorHealth]:
    # Deferred: ranges brings torch with it, and a report of finite frames is read without.
    from ..numerics.ranges import TensorHealth

    return reading.of(TensorHealth)


def _health(value: Any, where: str) -> TensorHealth:
    return _health_reader()(value, where)


_RECORD = reading.of(Record, health=reading.optional(_health))
_CURE = reading.of(Cure)


def _cure(value: Any, where: str) -> Cure:
    if isinstance(value, dict):
        value = {"patch": "", "effect": "", "code": "", **value}  # earlier reports have none of them
    return _CURE(value, where)


_FINDING = reading.of(Finding, operands=reading.tuple_of(_RECORD), cures=reading.tuple_of(_cure))


def read_finding(value: Any, where: str) -> Finding:
    """Return the finding that a JSON document has there. Raises ValueError."""
    if isinstance(value, dict):
        # Earlier reports have none of them.
        value = {"sequence": None, "spreads": [], "made": None, "samples": [], **value}
    return _FINDING(value, where)


_REPORT: dict[str, reading.Reader[Any]] = {
    "schema": reading.one_of((SCHEMA,)),
    "version": reading.one_of((VERSION,)),
    "frames": reading.tuple_of(reading.of(Frame, records=reading.tuple_of(_RECORD))),
    "finding": reading.optional(read_finding),
    "batch": reading.optional(reading.count),
    "rank": reading.count,
    "parameter_mesh": reading.tuple_of(reading.text),
    "attempt": reading.optional(read_attempt),
}


def _report(document: Any) -> Report:
    if isinstance(document, dict) and document.get("schema") == SCHEMA and document.get("version") != VERSION:
        raise ValueError(f"its version is {document.get('version')!r}, this nanwatch reads version {VERSION}")
    if isinstance(document, dict):
        document = {"parameter_mesh": [], "attempt": None, **document}  # earlier reports have neither
    found = reading.members(document, "report", _REPORT)
    return Report(**{name: value for name, value in found.items() if name not in ("schema", "version")})
