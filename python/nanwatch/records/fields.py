"""The fields of a named tuple as columns of a table, by their annotations.

`Record` and `Frame` in record.py are the declarations. From their fields come the order of the items in C++
(`csrc/make_columns.py` writes `csrc/numerics/columns.h`), the columns of traces and the JSON of reports
(`util/reading.py`). A new number in every record is a line there, `median: float | None = None`, and what computes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ..util import reading

_T = TypeVar("_T")
_KINDS = {bool: "bool", int: "int64", float: "float64", str: "string"}


class Cell(NamedTuple):
    """Mark in an annotation where a column differs from what the type says: `Annotated[str, Cell(name="class")]`."""

    name: str = ""
    kind: str = ""
    is_null_if_empty: bool = False


class Column(NamedTuple):
    """A column: its name, its type as pyarrow spells it, whether it may be null, and the field that it holds."""

    name: str
    kind: str
    may_be_null: bool
    field: str
    owner: type | None = None
    """The named tuple that `field` holds, where the column has a field of it."""
    part: str = ""
    """The field of `owner`."""
    choices: tuple[str, ...] = ()
    is_index: bool = False
    """Whether the values are tuples of integers, written as text: `[2, 3]`."""

    def cells(self, values: Iterable[Any]) -> Iterable[Any]:
        """Return the column from the values of the field."""
        if self.owner is not None:
            values = [None if one is None else getattr(one, self.part) for one in values]
        if self.is_index:
            return (None if one is None else _spell(one) for one in values)
        return (one or None for one in values) if self.may_be_null and self.kind == "string" else values

    def value(self, cell: Any) -> Any:
        """Return what the cell stands for. Raise ValueError for what no cell holds."""
        if self.is_index:
            return sizes(cell, self.name)
        if self.choices:
            return reading.one_of(self.choices)(cell, self.name)
        return "" if cell is None and self.kind == "string" else cell


class Fields(Generic[_T]):
    """The columns of a named tuple, and the way from a row of cells back to it.

    A named tuple in a field has a column for each of its own fields whose name is not taken. All of these are null
    where the field is None, and only then the first is. A tuple of named tuples, such as the records of a frame, has no
    column: each of them is a row.
    """

    def __init__(self, kind: type[_T]) -> None:
        self.kind = kind
        self.columns = tuple(_columns(kind))

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
        for field, (owner, own) in parts.items():
            is_there = next(iter(own.values())) is not None
            shared = {name: values[name] for name in owner.__annotations__ if name not in own}
            values[field] = owner(**shared, **own) if is_there else None
        return self.kind(**values)


@lru_cache(4096)  # a shape comes again in every batch
def _spell(index: Sequence[int]) -> str:
    return str(list(index))


def sizes(text: str | None, where: str) -> tuple[int, ...] | None:
    """Return the shape or index that is spelt so; None for None. Raise ValueError for other text."""
    return None if text is None else reading.tuple_of(reading.count)(json.loads(text), where)


def _columns(kind: type) -> Iterable[Column]:
    taken: set[str] = set()
    for field, annotation in get_type_hints(kind, include_extras=True).items():
        cell, plain, may_be_null = _read_annotation(annotation)
        if hasattr(plain, "_fields"):
            inner = [one for one in _columns(plain) if one.name not in taken]
            yield from (
                one._replace(may_be_null=True, field=field, owner=plain, part=one.field) for one in inner
            )
            continue
        arguments = get_args(plain)
        is_index = get_origin(plain) is tuple
        if is_index and arguments[0] is not int:
            continue
        choices = arguments if get_origin(plain) is Literal else ()
        taken.add(field)
        yield Column(
            cell.name or field,
            cell.kind or _KINDS[str if is_index or choices else plain],
            may_be_null or cell.is_null_if_empty,
            field,
            choices=choices,
            is_index=is_index,
        )


def _read_annotation(annotation: Any) -> tuple[Cell, Any, bool]:
    """Return the mark, the type without None, and whether the value may be None."""
    cell = Cell()
    if get_origin(annotation) is Annotated:
        annotation, cell = get_args(annotation)
    choices: Sequence[Any] = get_args(annotation)
    return (cell, choices[0], True) if type(None) in choices else (cell, annotation, False)
