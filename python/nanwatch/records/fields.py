"""The fields of a named tuple as columns of a table, by their annotations.

The declarations are `Record` and `Frame` in record.py. From these come the order of the items in C++ (`columns.h` by
`csrc/make_headers.py`), the columns of traces and the JSON of reports (reading.py). A new number in every record is a
line there, `median: float | None = None`, and what computes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from . import reading

_T = TypeVar("_T")
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
            return reading.read(self.type, json.loads(cell) if self.is_json else cell, self.name)
        return cell


class Fields(Generic[_T]):
    """The columns of a named tuple, and the way from a row of cells back to it.

    A named tuple in a field has a column for each of its own fields whose name is not taken. All of these are null
    where the field is None, and only then the first is. A tuple of named tuples, such as the records of a frame, has no
    column: each of them is a row.
    """

    def __init__(self, kind: type[_T]) -> None:
        self.kind, self.columns = kind, tuple(_columns(kind))

    def read(self, row: Mapping[str, Any], **others: Any) -> _T:
        """Return the named tuple of a row, with `others` for fields without columns. Raise ValueError for no such."""
        values: dict[str, Any] = dict(others)
        parts: dict[str, tuple[type, dict[str, Any]]] = {}
        for column in self.columns:
            value = column.value(row[column.name])
            if column.owner is None:
                values[column.field] = value
            else:
                parts.setdefault(column.field, (column.owner, {}))[1][column.part] = value
        for field, (owner, members) in parts.items():
            is_there = next(iter(members.values())) is not None
            shared = {name: values[name] for name in owner.__annotations__ if name not in members}
            values[field] = owner(**shared, **members) if is_there else None
        return self.kind(**values)


@lru_cache(4096)  # a shape comes again in every batch
def _spell(value: tuple[Any, ...]) -> str:
    return json.dumps(reading.plain(value))


def _columns(kind: type, owner: type | None = None) -> Iterable[Column]:
    """Yield the columns of a named tuple; with `owner`, of the parts of a field that holds one."""
    columns: dict[str, Column] = {}
    for field, annotation in get_type_hints(kind, include_extras=True).items():
        is_annotated = get_origin(annotation) is Annotated
        plain, cell = get_args(annotation) if is_annotated else (annotation, Cell())
        may_be_null = type(None) in get_args(plain)
        plain = get_args(plain)[0] if may_be_null else plain
        is_named = hasattr(plain, "_fields")
        if is_named and owner is None:
            for part in _columns(plain, plain):
                columns.setdefault(part.name, part._replace(field=field, part=part.field))
        elif get_origin(plain) is not tuple or get_args(plain)[0] is int:
            name, is_json = cell.name or field, is_named or get_origin(plain) is tuple
            nullable = may_be_null or cell.is_null_if_empty or owner is not None
            column = (name, cell.kind or _KINDS.get(plain, "string"), nullable, field, plain, is_json)
            columns[name] = Column(*column, cell.is_null_if_empty, owner)
    return columns.values()
