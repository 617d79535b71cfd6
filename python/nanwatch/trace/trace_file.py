"""File of a trace: its columns, and its reader, which gives batches, frames and arrays.

One row a record. Strings are plain strings, which Parquet itself keeps as numbers into a list, so that a reader which
knows nothing of nanwatch can filter and group by them. docs/traces.md is the same table for users.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..numerics.formats import limits
from ..numerics.ranges import SKETCH_WIDTH
from ..records.fields import columns_of, from_row, read
from ..records.record import Frame, Record
from ..report.finding import find
from ..report.report import Report
from ..util.messages import Tell, needed, silent, spell, visible

VERSION = 10
SUFFIX = ".parquet"
# Key in the metadata of every part's schema: a JSON object with the fields of Facts.
METADATA_KEY = b"nanwatch.trace"

# Name, type as pyarrow spells it, and whether it may be null: of the frame, of the record, and what only a trace knows.
COLUMNS = (
    *((column.name, column.kind, column.may_be_null) for column in (*columns_of(Frame), *columns_of(Record))),
    ("call", "int64", False),
    ("rank", "int32", False),
    ("sketch", "binary", True),
)
STRINGS = tuple(name for name, kind, _ in COLUMNS if kind == "string")

Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Sketches: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"


class Trace:
    """A file that `watch(model, trace=...)` wrote, or the folder of parts that it is until the watch ends.

    Needs `pyarrow`. A file that is no trace of a known version raises TraceError, a ValueError.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, trace="run.parquet"):
        ...     output = model(torch.tensor([-1.0, 2.0]))
        >>> trace = nanwatch.Trace.open("run.parquet")
        >>> trace.batches, trace.table(["label", "abs_max"]).num_rows
        ((0,), 2)
        >>> trace.report(0).frames == trace.frames(0)
        True
    """

    def __init__(self, path: Path, dataset: Any, facts: Facts, tell: Tell = silent) -> None:
        self.path = path
        self.tell = tell
        # The rank of the process that wrote it, and the number of frames that came too fast to be taken or written.
        self.rank, self.lost_frames = facts.rank, facts.lost_frames
        self._dataset = dataset

    @classmethod
    def open(cls, path: str | os.PathLike[str], tell: Tell = silent) -> Trace:
        """Open the trace at `path`, which reports the progress of a read to `tell`.

        Raises TraceError for a file that is no trace, FileNotFoundError for none.
        """
        place = Path(path)
        datasets = arrow("pyarrow.dataset", "reading a trace")
        if not place.exists():
            raise FileNotFoundError(f"there is no trace at {place}; pass what watch(trace=...) was given")
        parts = sorted(place.glob(f"part-*{SUFFIX}")) if place.is_dir() else [place]
        if not parts:
            why = "nothing was written to it yet, or it is no trace"
            raise TraceError(f"{place} is a folder without parts (part-*{SUFFIX}); {why}")
        try:
            options = datasets.ParquetReadOptions(dictionary_columns=STRINGS)
            how = datasets.ParquetFileFormat(read_options=options)
            # The latest part knows best what was lost.
            schema = datasets.dataset(str(parts[-1]), format=how).schema
            facts = facts_of(schema, str(place))
            dataset = datasets.dataset([str(part) for part in parts], format=how, schema=schema)
        except errors() as error:
            if isinstance(error, TraceError):
                raise
            # pyarrow names the file twice before it says why.
            why = visible(str(error).rpartition(": ")[2].rstrip("."))[:200]
            hint = "; nanwatch show reads a report" if parts[-1].suffix == ".json" else ""
            raise TraceError(f"{parts[-1]} is no Parquet file that can be read: {why}{hint}") from error
        return cls(place, dataset, facts, tell)

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Return the numbers of the batches in it, in order."""
        return tuple(np.unique(self.table(["batch"])["batch"].to_numpy()).tolist())

    @cached_property
    def sketched_batches(self) -> tuple[int, ...]:
        """Return the numbers of the batches with sketches, in order."""
        compute = arrow("pyarrow.compute", "reading a trace")
        rows = self._read(["batch"], compute.field("sketch").is_valid())
        return tuple(np.unique(rows["batch"].to_numpy()).tolist())

    def table(self, columns: Sequence[str] | None = None, batches: Sequence[int] | None = None) -> Any:
        """Return a pyarrow.Table of these columns (default: all) and batches (default: all), in the order written.

        Columns of strings are dictionary-encoded.
        """
        pa = arrow("pyarrow", "reading a trace")
        compute = arrow("pyarrow.compute", "reading a trace")
        wanted = None if batches is None else compute.field("batch").isin(pa.array(batches, pa.int64()))
        names = [name for name, _, _ in COLUMNS] if columns is None else list(columns)
        return self._read(names, wanted)

    def _read(self, names: list[str], wanted: Any) -> Any:
        self.tell(f"reading {self.path.name}")
        try:
            table = self._dataset.to_table(columns=names, filter=wanted)
            # A file is anybody's, and pyarrow itself would read beyond the end of a list of strings.
            table.validate(full=True)
        except errors() as error:
            raise TraceError(f"{self.path} cannot be read: {spell(error)}") from error
        return table

    def frames(self, batch: int) -> tuple[Frame, ...]:
        """Return the frames of a batch in the order of their calls. Raise ValueError for a batch that is not there."""
        table = self.table([name for name, _, _ in COLUMNS if name != "sketch"], [batch])
        if table.num_rows == 0:
            raise ValueError(f"{self.path} has no batch {batch}; it has {batch_words(self.batches)}")
        # Calls of several threads may stand in turns.
        return frames_of(table.sort_by([("rank", "ascending"), ("call", "ascending")]), self.tell)

    def report(self, batch: int) -> Report:
        """Return the frames of a batch as a report. Its finding knows nothing of the batch's arguments."""
        frames = self.frames(batch)
        return Report(frames, find(frames, rank=self.rank), batch, self.rank, attempt=None)


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

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))  # it may quote a file from a stranger


def arrow(name: str, what: str) -> Any:
    """Import the part `name` of pyarrow, which `what` needs."""
    return needed(name, what, "trace")


class Facts(NamedTuple):
    """Facts of a trace: the version of its format, and where and how it was written."""

    version: int
    nanwatch: str
    torch: str
    rank: int
    every: int
    lost_frames: int


def schema(facts: dict[str, Any] | None = None) -> Any:
    """Return the pyarrow schema of a trace, with `facts` among its metadata."""
    pa = import_module("pyarrow")
    metadata = None if facts is None else {METADATA_KEY: json.dumps(facts).encode()}
    fields = [pa.field(name, pa.type_for_alias(kind), nullable) for name, kind, nullable in COLUMNS]
    return pa.schema(fields, metadata=metadata)


def facts_of(file_schema: Any, where: str) -> Facts:
    """Return the facts in the metadata of a schema. Raise TraceError unless it is a trace of a version read here."""
    text = (file_schema.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise TraceError(f"{where} is no trace of nanwatch: its metadata lacks {METADATA_KEY.decode()!r}")
    try:
        facts = json.loads(text)
        version = facts.get("version") if isinstance(facts, dict) else VERSION
        if version != VERSION:
            raise ValueError(f"its version is {version!r}, this nanwatch reads version {VERSION}")
        checked: Facts = read(Facts, facts, "metadata")
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is no trace that can be read: {error}") from error
    return checked


def errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a damaged or foreign file may raise."""
    kind: type[Exception] = import_module("pyarrow").ArrowException
    return OSError, ValueError, IndexError, MemoryError, kind


# Rows as frames.


def frames_of(table: Any, tell: Tell = silent) -> tuple[Frame, ...]:
    """Return the frames of a table with the columns of a trace. Raise TraceError for values that no trace has."""
    frames, done, rows = list[Frame](), 0, table.to_pylist()
    try:
        for _, group in groupby(rows, itemgetter("batch", "call", "rank")):
            of_call = list(group)
            done += len(of_call)
            tell("making frames", done, len(rows), "rows")
            records = tuple(from_row(Record, row) for row in of_call)
            frames.append(from_row(Frame, of_call[0], records=records))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not a row of a trace: {error}") from error
    return tuple(frames)


# Columns as arrays.


@dataclass(frozen=True)
class Strings:
    """A column of strings: for each row its place in `values`, -1 where it has none."""

    codes: np.ndarray[Any, np.dtype[np.int32]]
    values: tuple[str, ...]

    def text(self, row: int) -> str:
        """Return the string of a row, "" for none."""
        code = self.codes[row]
        return "" if code < 0 else self.values[code]

    def each(self, is_meant: Callable[[str], bool]) -> Flags:
        """Return for each row whether its string is meant, which is asked once for each string."""
        flags: Flags = np.array([*map(is_meant, self.values), False])[self.codes]
        return flags


def strings(column: Any) -> Strings:
    """Return a column of strings of a table."""
    pa = arrow("pyarrow", "reading a trace")
    if column.num_chunks == 0:
        return Strings(np.empty(0, np.int32), ())
    whole = pa.table({"column": column}).unify_dictionaries()["column"]
    values = whole.chunk(0).dictionary.to_pylist()
    codes = [chunk.indices.fill_null(-1).to_numpy() for chunk in whole.chunks]
    return Strings(np.concatenate(codes).astype(np.int32, copy=False), tuple(values))


def in_order(table: Any) -> Any:
    """Return the rows by batch and call: batches of several threads stand in turns."""
    batch, call = table["batch"].to_numpy(), table["call"].to_numpy()
    later = (batch[1:] > batch[:-1]) | ((batch[1:] == batch[:-1]) & (call[1:] >= call[:-1]))
    return table if later.all() else table.take(np.lexsort((call, batch)))


class Ends(NamedTuple):
    """The ends of the format of each row, as `Record.ends`; nan where it has none."""

    largest: Floats
    smallest_normal: Floats
    smallest_subnormal: Floats


def ends_of(table: Any) -> Ends:
    """Return the ends of each row of a table with the column "dtype"."""
    dtypes = strings(table["dtype"])
    ends = [limits(name) or (np.nan,) * 3 for name in dtypes.values]
    return Ends(*np.array([*ends, (np.nan,) * 3], np.float64)[dtypes.codes].T)


def sketches(cell: bytes) -> Sketches:
    """Return the sketches in a cell of a trace, float64 of shape (rows of the tensor, 32)."""
    return np.frombuffer(cell, "<f4").reshape(-1, SKETCH_WIDTH).astype(np.float64)


def batch_words(batches: Sequence[int]) -> str:
    """Return `batches 0 to 199 (200 of them)`, for messages."""
    if not batches:
        return "no batch at all"
    if len(batches) == 1:
        return f"batch {batches[0]}"
    return f"batches {batches[0]} to {batches[-1]} ({len(batches):,} of them)"
