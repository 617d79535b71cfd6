"""Frames and the finding, and their forms: text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, TypeVar

from . import text
from .finding import ORIGINS, VALUES, Cure, Finding
from .frame import PHASES, Frame
from .record import ROLES, Record

if TYPE_CHECKING:
    from .ranges import TensorHealth

SCHEMA = "nanwatch.report"
VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Report:
    """What a watch saw: `frames` (oldest first), the `finding` (None when all is finite), `batch` (the latest
    number, None before the first batch) and the `rank` of the process."""

    frames: tuple[Frame, ...]
    finding: Finding | None
    batch: int | None
    rank: int = 0

    def to_text(self, color: bool = False) -> str:
        """The frames in columns and the finding in words; ANSI colours with `color`, which needs `rich`."""
        return text.report_text(self.frames, self.finding, self.batch, color=color)

    def to_json(self) -> str:
        """One strict JSON document; nan and the infinities are the strings "nan", "inf" and "-inf"."""
        document = {"schema": SCHEMA, "version": VERSION, **_plain(self)}
        return json.dumps(document, allow_nan=False)

    def to_html(self) -> str:
        """One page that opens offline and sends nothing: the finding, a chart, headroom by module, every record.

        Write it as UTF-8. Needs `jinja2` and `plotly`: raises ImportError, naming the extra, without them.
        """
        from .html import report_html

        return report_html(self)

    @classmethod
    def from_json(cls, document: str) -> Report:
        """The report that `to_json` wrote. Raises ValueError, saying where, for anything else."""
        try:
            return _report(json.loads(document, parse_constant=_refuse_constant))
        except RecursionError:
            raise ValueError(
                "not a nanwatch report: nested too deeply; pass what Report.to_json() wrote"
            ) from None
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"not a nanwatch report: {error}; pass the whole text that Report.to_json() wrote"
            ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [_plain(item) for item in value]
    names = _field_names(type(value))
    return {name: _plain(getattr(value, name)) for name in names} if names else value


def _field_names(kind: type) -> tuple[str, ...]:
    if hasattr(kind, "__dataclass_fields__"):
        return tuple(field.name for field in fields(kind))
    return tuple(getattr(kind, "_fields", ()))


# Reading back. Every function takes the value and the path of it, so that an error names the place.
_Reader = Callable[[Any, str], _T]


def _refuse_constant(name: str) -> float:
    raise ValueError(f'{name} is no JSON number; "{name}" in quotes was expected')


def _fail(where: str, expected: str, value: Any) -> ValueError:
    shown = repr(value)
    return ValueError(
        f"{where} should be {expected}, got {shown if len(shown) <= 60 else shown[:57] + '...'}"
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _fail(where, "a string", value)
    return value


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _fail(where, "an integer", value)
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _fail(where, "true or false", value)
    return value


def _number(value: Any, where: str) -> float:
    special = {"nan": nan, "inf": inf, "-inf": -inf}
    if isinstance(value, str) and value in special:
        return special[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = inf
        if isfinite(number):
            return number
    raise _fail(where, 'a number, "nan", "inf" or "-inf"', value)


def _one_of(choices: tuple[_T, ...]) -> _Reader[_T]:
    def read(value: Any, where: str) -> _T:
        if value not in choices:
            raise _fail(where, f"one of {', '.join(map(repr, choices))}", value)
        return choices[choices.index(value)]

    return read


def _optional(read: _Reader[_T]) -> _Reader[_T | None]:
    return lambda value, where: None if value is None else read(value, where)


def _tuple_of(read: _Reader[_T]) -> _Reader[tuple[_T, ...]]:
    def read_all(value: Any, where: str) -> tuple[_T, ...]:
        if not isinstance(value, list):
            raise _fail(where, "a list", value)
        return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(value))

    return read_all


def _members(value: Any, where: str, readers: Mapping[str, _Reader[Any]]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _fail(where, "an object", value)
    for name in readers:
        if name not in value:
            raise ValueError(f"{where} has no {name!r}")
    for name in value:
        if name not in readers:
            raise ValueError(f"{where} has {name!r}, which version {VERSION} does not know")
    return {name: read(value[name], f"{where}.{name}") for name, read in readers.items()}


_HEALTH: dict[str, _Reader[Any]] = {
    "abs_min": _number,
    "abs_max": _number,
    "isfinite": _flag,
    "finite_abs_min": _number,
    "finite_abs_max": _number,
    "num_nan": _count,
    "num_posinf": _count,
    "num_neginf": _count,
    "num_zero": _count,
    "num_subnormal": _count,
    "numel": _count,
    "first_nonfinite": _optional(_tuple_of(_count)),
}


def _health(value: Any, where: str) -> TensorHealth:
    # Here and not above: ranges brings torch with it, and a report of finite frames is read without.
    from .ranges import TensorHealth

    return TensorHealth(**_members(value, where, _HEALTH))


_RECORD: dict[str, _Reader[Any]] = {
    "label": _text,
    "role": _one_of(ROLES),
    "shape": _optional(_tuple_of(_count)),
    "dtype": _text,
    "abs_min": _optional(_number),
    "abs_max": _optional(_number),
    "isfinite": _optional(_flag),
    "health": _optional(_health),
    "note": _text,
}

_FRAME: dict[str, _Reader[Any]] = {
    "batch": _count,
    "name": _text,
    "class_name": _text,
    "records": _tuple_of(lambda value, where: Record(**_members(value, where, _RECORD))),
    "phase": _one_of(PHASES),
    "recomputed": _flag,
}

_CURE: dict[str, _Reader[Any]] = {"what": _text, "works": _flag, "headroom_bits": _optional(_number)}

_FINDING: dict[str, _Reader[Any]] = {
    "module": _text,
    "class_name": _text,
    "label": _text,
    "batch": _count,
    "rank": _count,
    "value": _one_of(VALUES),
    "origin": _one_of(ORIGINS),
    "source_module": _optional(_text),
    "num_nonfinite": _optional(_count),
    "numel": _count,
    "index": _optional(_tuple_of(_count)),
    "extent": _text,
    "operation": _optional(_text),
    "source": _optional(_text),
    "transient": _optional(_flag),
    "cures": _tuple_of(lambda value, where: Cure(**_members(value, where, _CURE))),
    "operands": _tuple_of(lambda value, where: Record(**_members(value, where, _RECORD))),
    "remarks": _tuple_of(_text),
    "files": _tuple_of(_text),
}

_REPORT: dict[str, _Reader[Any]] = {
    "schema": _one_of((SCHEMA,)),
    "version": _one_of((VERSION,)),
    "frames": _tuple_of(lambda value, where: Frame(**_members(value, where, _FRAME))),
    "finding": _optional(lambda value, where: Finding(**_members(value, where, _FINDING))),
    "batch": _optional(_count),
    "rank": _count,
}


def _report(document: Any) -> Report:
    if isinstance(document, dict) and document.get("schema") == SCHEMA and document.get("version") != VERSION:
        raise ValueError(f"its version is {document.get('version')!r}, this nanwatch reads version {VERSION}")
    members = _members(document, "report", _REPORT)
    return Report(members["frames"], members["finding"], members["batch"], members["rank"])
