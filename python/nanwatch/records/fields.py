"""Fields of dataclasses and named tuples, by their annotations: as JSON, and as columns of a table.

The declarations are `Record` and `Frame` in record.py. From these come the order of the items in C++ (`columns.h` by
`csrc/make_headers.py`), the columns of traces and the JSON of reports. A new number in every record is a line there,
`median: float | None = None`, and what computes it. `plain` writes JSON, and `read` reads what may be anybody's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from inspect import signature
from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ..util.messages import shorten, visible

_T = TypeVar("_T")
_PLAIN = {str: "a string", int: "an integer", bool: "true or false"}


def plain(value: Any) -> Any:
    """Return `value` for JSON: dataclasses and named tuples as dicts, tuples as lists, nan and inf as strings.

    A field of a NamedTuple that is None, and None by default, is left out.
    """
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    names = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", ())
    if not names:
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value
    defaults = getattr(value, "_field_defaults", {})
    left_out = [name for name in names if getattr(value, name) is defaults.get(name, value) is None]
    return {name.removesuffix("_"): plain(getattr(value, name)) for name in names if name not in left_out}


def read(kind: Any, value: Any, where: str) -> Any:
    """Return what a document has in place of a value of this type: a dataclass, a NamedTuple, or what they hold.

    Raises ValueError with the place in the document, `where`, for anything else.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and type(None) in arguments):
        return value
    if origin is Annotated or type(None) in arguments:
        return read(arguments[0], value, where)
    if origin is Literal or kind in _PLAIN:
        expected = f"one of {', '.join(map(repr, arguments))}" if arguments else _PLAIN[kind]
        _check(value in arguments if arguments else type(value) is kind, where, expected, value)
        return value
    if origin in (tuple, list):
        size = None if origin is list or arguments[-1] is Ellipsis else len(arguments)
        is_right = isinstance(value, list) and size in (None, len(value))
        _check(is_right, where, "a list" if size is None else f"a list of {size}", value)
        kinds = arguments if size else arguments[:1] * len(value)
        return origin(read(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is float:
        # An int beyond a float's range, or a nan that is no string, comes from no writer of ours.
        is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        _check(is_number or value in ("nan", "inf", "-inf"), where, 'a number, "nan", "inf" or "-inf"', value)
        return float(value)
    _check(isinstance(value, dict), where, "an object", value)
    if origin in (dict, Mapping):
        return {key: read(arguments[1], item, f"{where}[{shorten(key)}]") for key, item in value.items()}
    fields, values = _fields(kind), {}
    if missing := [name for name, field in fields.items() if name not in value and not field[2]]:
        raise ValueError(f"{where} has no {missing[0]!r}")
    for name, item in value.items():
        if name not in fields:
            raise ValueError(f"{where} has {shorten(name)}, which this version does not know")
        values[fields[name][0]] = read(fields[name][1], item, f"{where}.{name}")
    return kind(**values)


def _check(is_right: bool, where: str, expected: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"{where} should be {expected}, got {shorten(value)}")


@cache
def _fields(kind: Any) -> dict[str, tuple[str, Any, bool]]:
    """Return the fields by their names in a document: each name here, its type, and whether it may be missing."""
    hints, parameters = get_type_hints(kind, include_extras=True), signature(kind).parameters.values()
    # A name that Python reserves has an underscore behind it: `class_` is "class".
    return {x.name.removesuffix("_"): (x.name, hints[x.name], x.default is not x.empty) for x in parameters}


def parsed(text: str, read_all: Callable[[Any], _T], what: str) -> _T:
    """Parse a JSON text and return what `read_all` makes of it. Raise ValueError with the reason."""
    try:
        return read_all(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(visible(f"not {what}: {error}; pass the whole text that to_json() wrote")) from error


def body_of(document: Any, schema: str, version: int) -> dict[str, Any]:
    """Return the members of a document but for its schema and version. Raise ValueError for others than these."""
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise ValueError(f"no document of the schema {schema!r}")
    if (came := document.get("version")) != version:
        raise ValueError(f"its version is {shorten(came)}, this nanwatch reads version {version}")
    return {name: value for name, value in document.items() if name not in ("schema", "version")}


_KINDS = {bool: "bool", int: "int64", float: "float64"}


class Cell(NamedTuple):
    """Mark in an annotation where a column differs from what the type says: `Annotated[str, Cell(name="class")]`."""

    name: str = ""
    kind: str = ""
    is_null_if_empty: bool = False


class Column(NamedTuple):
    """A column: its name, its type as pyarrow spells it, whether it may be null, and the field that it holds.

    `is_json`: the cells are texts of JSON, such as `[2, 3]`. Where the field holds a named tuple, its class is `owner`,
    and the column has the field `part` of that.
    """

    name: str
    kind: str
    may_be_null: bool
    field: str
    type: Any
    is_json: bool
    is_null_if_empty: bool
    owner: type | None = None
    part: str = ""

    def cells(self, values: Iterable[Any]) -> Iterable[Any]:
        """Return the column from the values of the field."""
        if self.owner is not None:
            values = [None if value is None else getattr(value, self.part) for value in values]
        if self.is_json:
            return (None if value is None else _spell(value) for value in values)
        return (value or None for value in values) if self.is_null_if_empty else values

    def value(self, cell: Any) -> Any:
        """Return what the cell stands for. Raise ValueError for what no cell holds."""
        if cell is None and self.may_be_null:
            return "" if self.is_null_if_empty else None
        if self.is_json or get_origin(self.type) is Literal:
            return read(self.type, json.loads(cell) if self.is_json else cell, self.name)
        return cell


@cache
def columns_of(kind: type, owner: type | None = None) -> tuple[Column, ...]:
    """Return the columns of a named tuple; with `owner`, of the parts of a field that holds one.

    A named tuple in a field has a column for each of its own fields whose name is not taken. All of these are null
    where the field is None, and only then the first is. A tuple of named tuples, such as the records of a frame, has no
    column: each of them is a row.
    """
    columns: dict[str, Column] = {}
    for field, annotation in get_type_hints(kind, include_extras=True).items():
        is_annotated = get_origin(annotation) is Annotated
        plain_type, cell = get_args(annotation) if is_annotated else (annotation, Cell())
        may_be_null = type(None) in get_args(plain_type)
        plain_type = get_args(plain_type)[0] if may_be_null else plain_type
        is_named = hasattr(plain_type, "_fields")
        if is_named and owner is None:
            for part in columns_of(plain_type, plain_type):
                columns.setdefault(part.name, part._replace(field=field, part=part.field))
        elif get_origin(plain_type) is not tuple or get_args(plain_type)[0] is int:
            name, is_json = cell.name or field, is_named or get_origin(plain_type) is tuple
            nullable = may_be_null or cell.is_null_if_empty or owner is not None
            column_kind = cell.kind or _KINDS.get(plain_type, "string")
            column = name, column_kind, nullable, field, plain_type, is_json
            columns[name] = Column(*column, cell.is_null_if_empty, owner)
    return tuple(columns.values())


def from_row(kind: Any, row: Mapping[str, Any], **others: Any) -> Any:
    """Return the named tuple of a row of cells, with `others` for fields without columns. Raise ValueError for none."""
    values: dict[str, Any] = dict(others)
    for column in columns_of(kind):
        if column.owner is None:
            values[column.field] = column.value(row[column.name])
        elif column.field not in values:  # the first of its columns is null where the field is None
            is_there = row[column.name] is not None
            values[column.field] = from_row(column.owner, row) if is_there else None
    return kind(**values)


@lru_cache(4096)  # a shape comes again in every batch
def _spell(value: tuple[Any, ...]) -> str:
    return json.dumps(plain(value))
