"""Rows of a trace: from the records of frames to columns on disk, and back.

One row a record. Strings are plain strings, which Parquet itself keeps as numbers into a list, so that a reader which
knows nothing of nanwatch can filter and group by them. docs/traces.md is the same table for users.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..recording.observe import take_sketch
from ..records.fields import columns_of, from_row, read
from ..records.record import Frame, Record
from ..util.messages import Tell, needed, silent, visible, with_utf8

VERSION = 10
SUFFIX = ".parquet"
# Key in the metadata of every part's schema: a JSON object with the fields of Facts.
METADATA_KEY = b"nanwatch.trace"

_FRAME, _RECORD = columns_of(Frame), columns_of(Record)
# Name, type as pyarrow spells it, and whether it may be null: of the frame, of the record, and what only a trace knows.
COLUMNS = (
    *((column.name, column.kind, column.may_be_null) for column in (*_FRAME, *_RECORD)),
    ("call", "int64", False),
    ("rank", "int32", False),
    ("sketch", "binary", True),
)
STRINGS = tuple(name for name, kind, _ in COLUMNS if kind == "string")


class Facts(NamedTuple):
    """Facts of a trace: the version of its format, and where and how it was written."""

    version: int
    nanwatch: str
    torch: str
    rank: int
    every: int
    lost_frames: int


class TraceError(ValueError):
    """The file is no trace of a version that this nanwatch reads. The text names the file and the place in it.

    Examples:
        >>> import nanwatch, pathlib
        >>> size = pathlib.Path("run.parquet").write_text("no trace")
        >>> try:
        ...     nanwatch.Trace.open("run.parquet")
        ... except ValueError as error:
        ...     print(str(error).split(":")[0])
        run.parquet is no Parquet file that can be read
    """


def unreadable(message: str) -> TraceError:
    """Return a TraceError. Its message may quote a file from a stranger."""
    return TraceError(visible(message))


def arrow(name: str, what: str) -> Any:
    """Import the part `name` of pyarrow, which `what` needs."""
    return needed(name, what, "trace")


def errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a damaged or foreign file may raise."""
    kind: type[Exception] = import_module("pyarrow").ArrowException
    return OSError, ValueError, IndexError, MemoryError, kind


def schema(facts: dict[str, Any] | None = None) -> Any:
    """Return the pyarrow schema of a trace, with `facts` among its metadata."""
    pa = import_module("pyarrow")
    metadata = None if facts is None else {METADATA_KEY: json.dumps(facts).encode()}
    fields = [pa.field(name, pa.type_for_alias(kind), nullable) for name, kind, nullable in COLUMNS]
    return pa.schema(fields, metadata=metadata)


def facts_of(file_schema: Any, where: str) -> dict[str, Any]:
    """Return the facts in the metadata of a schema. Raise TraceError unless it is a trace of a version read here."""
    text = (file_schema.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise unreadable(f"{where} is no trace of nanwatch: its metadata lacks {METADATA_KEY.decode()!r}")
    try:
        facts = json.loads(text)
        if isinstance(facts, dict) and facts.get("version") != VERSION:
            raise ValueError(
                f"its version is {facts.get('version')!r}, this nanwatch reads version {VERSION}"
            )
        facts = read(Facts, facts, "metadata")
    except (ValueError, RecursionError) as error:
        raise unreadable(f"{where} is no trace that can be read: {error}") from error
    expected = schema()
    for field in expected:
        kinds = [file_schema.field(i).type for i in file_schema.get_all_field_indices(field.name)]
        if kinds != [field.type]:
            got = ", ".join(map(str, kinds)) or "none"
            raise unreadable(f"{where}: column {field.name!r} should be one of {field.type}, got {got}")
    return dict(facts._asdict())


class Tabulator:
    """Maker of tables from the frames of one process, which counts the calls of each batch."""

    # Frames of a batch may come late, recomputed in the backward or of a thread that others held up while they ran
    # hundreds of small batches; but not while so many others have frames.
    _BATCHES_REMEMBERED = 4096

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._calls: dict[int, int] = {}

    def table(self, frames: Sequence[Frame]) -> Any:
        """Return one row a record, in the order of the frames; `frames` hold a record at least."""
        pa = import_module("pyarrow")
        rows = list(chain.from_iterable(frame.records for frame in frames))
        # The place in `frames` of the frame of each row.
        place = pa.array(np.repeat(np.arange(len(frames)), [len(frame.records) for frame in frames]))
        columns = {
            "call": pa.array([self._call(frame.batch) for frame in frames], pa.int64()).take(place),
            "rank": pa.array(np.full(len(rows), self._rank, np.int32)),
            "sketch": pa.array(map(take_sketch, rows), pa.binary()),
        }
        values = dict(zip(Frame._fields, zip(*frames, strict=True), strict=True))
        for column in _FRAME:
            columns[column.name] = _column(column.kind, column.cells(values[column.field])).take(place)
        values = dict(zip(Record._fields, zip(*rows, strict=True), strict=True))
        for column in _RECORD:
            if column.owner is not None and not any(values[column.field]):
                columns[column.name] = pa.nulls(len(rows), pa.type_for_alias(column.kind))
            else:
                columns[column.name] = _column(column.kind, column.cells(values[column.field]))
        return pa.table(columns, schema=schema())

    def _call(self, batch: int) -> int:
        call = self._calls.pop(batch, 0)
        self._calls[batch] = call + 1  # at the end: the first one is the longest without a frame
        if len(self._calls) > self._BATCHES_REMEMBERED:
            del self._calls[next(iter(self._calls))]
        return call


def _column(kind: str, cells: Iterable[Any]) -> Any:
    pa = import_module("pyarrow")
    values = list(cells)
    try:
        return pa.array(values, pa.type_for_alias(kind))
    except UnicodeEncodeError:  # a lone surrogate in somebody's name has no UTF-8
        return pa.array([None if text is None else with_utf8(text) for text in values], pa.string())


# Back.


def frames_of(table: Any, tell: Tell = silent) -> tuple[Frame, ...]:
    """Return the frames of a table with the columns of a trace. Raise TraceError for values that no trace has."""
    try:
        return tuple(_frames(table.to_pylist(), tell))
    except (ValueError, RecursionError) as error:
        raise unreadable(f"not a row of a trace: {error}") from error


def _frames(rows: list[dict[str, Any]], tell: Tell) -> Iterable[Frame]:
    start = 0
    for end in range(1, len(rows) + 1):
        first = rows[start]
        if end < len(rows) and all(rows[end][name] == first[name] for name in ("batch", "call", "rank")):
            continue
        tell("making frames", end, len(rows), "rows")
        yield from_row(Frame, first, records=tuple(from_row(Record, row) for row in rows[start:end]))
        start = end
