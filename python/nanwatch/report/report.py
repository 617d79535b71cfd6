"""Frames and the finding, and their forms: text, JSON and HTML."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from ..util import reading
from ..util.progress import Tell, silent
from ..util.visible import wants_color
from . import text
from .attempt import Attempt, read_attempt
from .finding import ORIGINS, VALUES, Cure, Finding
from .frame import PHASES, Frame
from .record import ROLES, Record
from .spread import Spread

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

_HEALTH: dict[str, reading.Reader[Any]] = {
    "abs_min": reading.number,
    "abs_max": reading.number,
    "isfinite": reading.flag,
    "finite_abs_min": reading.number,
    "finite_abs_max": reading.number,
    "num_nan": reading.count,
    "num_posinf": reading.count,
    "num_neginf": reading.count,
    "num_zero": reading.count,
    "num_subnormal": reading.count,
    "numel": reading.count,
    "first_nonfinite": reading.optional(reading.tuple_of(reading.count)),
}


def _health(value: Any, where: str) -> TensorHealth:
    # Here and not above: ranges brings torch with it, and a report of finite frames is read without.
    from ..numerics.ranges import TensorHealth

    return TensorHealth(**reading.members(value, where, _HEALTH))


_RECORD: dict[str, reading.Reader[Any]] = {
    "label": reading.text,
    "role": reading.one_of(ROLES),
    "shape": reading.optional(reading.tuple_of(reading.count)),
    "dtype": reading.text,
    "abs_min": reading.optional(reading.number),
    "abs_max": reading.optional(reading.number),
    "isfinite": reading.optional(reading.flag),
    "health": reading.optional(_health),
    "note": reading.text,
}

_FRAME: dict[str, reading.Reader[Any]] = {
    "batch": reading.count,
    "name": reading.text,
    "class_name": reading.text,
    "records": reading.tuple_of(lambda value, where: Record(**reading.members(value, where, _RECORD))),
    "phase": reading.one_of(PHASES),
    "recomputed": reading.flag,
}

_CURE: dict[str, reading.Reader[Any]] = {
    "what": reading.text,
    "works": reading.flag,
    "headroom_bits": reading.optional(reading.number),
}

_SPREAD: dict[str, reading.Reader[Any]] = {
    "label": reading.text,
    "dtype": reading.text,
    "first": reading.count,
    "counts": reading.tuple_of(reading.count),
    "num_zero": reading.count,
    "num_nan": reading.count,
    "num_posinf": reading.count,
    "num_neginf": reading.count,
}

_FINDING: dict[str, reading.Reader[Any]] = {
    "module": reading.text,
    "class_name": reading.text,
    "label": reading.text,
    "batch": reading.count,
    "rank": reading.count,
    "value": reading.one_of(VALUES),
    "origin": reading.one_of(ORIGINS),
    "source_module": reading.optional(reading.text),
    "num_nonfinite": reading.optional(reading.count),
    "numel": reading.count,
    "index": reading.optional(reading.tuple_of(reading.count)),
    "extent": reading.text,
    "operation": reading.optional(reading.text),
    "source": reading.optional(reading.text),
    "transient": reading.optional(reading.flag),
    "cures": reading.tuple_of(lambda value, where: Cure(**reading.members(value, where, _CURE))),
    "operands": reading.tuple_of(lambda value, where: Record(**reading.members(value, where, _RECORD))),
    "remarks": reading.tuple_of(reading.text),
    "files": reading.tuple_of(reading.text),
    "phase": reading.one_of(PHASES),
    "sequence": reading.optional(reading.count),
    "spreads": reading.tuple_of(lambda value, where: Spread(**reading.members(value, where, _SPREAD))),
    "made": reading.optional(reading.one_of(VALUES)),
}


def read_finding(value: Any, where: str) -> Finding:
    """The finding that a JSON document has there. Raises ValueError."""
    if isinstance(value, dict):
        value = {"sequence": None, "spreads": [], "made": None, **value}  # earlier reports have none of them
    return Finding(**reading.members(value, where, _FINDING))


_REPORT: dict[str, reading.Reader[Any]] = {
    "schema": reading.one_of((SCHEMA,)),
    "version": reading.one_of((VERSION,)),
    "frames": reading.tuple_of(lambda value, where: Frame(**reading.members(value, where, _FRAME))),
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
