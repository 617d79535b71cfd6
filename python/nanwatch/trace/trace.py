"""Rows of a trace: from the records of frames to columns on disk, and back.

One row a record. Strings are plain strings, which Parquet itself keeps as numbers into a list, so that a reader which
knows nothing of nanwatch can filter and group by them. docs/traces.md is the same table for users.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from itertools import chain
from math import isnan
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..numerics.formats import Statistics, TensorHealth
from ..recording.observe import take_sketch
from ..report.record import PHASES, ROLES, Frame, FrameRows, Record, Row
from ..util import reading
from ..util.imports import needed
from ..util.progress import Tell, silent
from ..util.visible import visible, with_utf8

VERSION = 4
READ_VERSIONS = (1, 2, 3, 4)
SUFFIX = ".parquet"
# Key in the metadata of every part's schema: a JSON object with the members of FACTS.
METADATA_KEY = b"nanwatch.trace"

# Name, type as pyarrow spells it, and whether it may be null.
COLUMNS = (
    ("batch", "int64", False),
    ("call", "int64", False),
    ("module", "string", False),
    ("class", "string", False),
    ("label", "string", False),
    ("role", "string", False),
    ("shape", "string", True),
    ("dtype", "string", True),
    ("abs_min", "float64", True),
    ("abs_max", "float64", True),
    ("isfinite", "bool", True),
    ("note", "string", False),
    ("phase", "string", False),
    ("recomputed", "bool", False),
    ("rank", "int32", False),
    ("numel", "int64", True),
    ("num_nan", "int64", True),
    ("num_posinf", "int64", True),
    ("num_neginf", "int64", True),
    ("num_zero", "int64", True),
    ("num_subnormal", "int64", True),
    ("finite_abs_min", "float64", True),
    ("finite_abs_max", "float64", True),
    ("first_nonfinite", "string", True),
    ("weight_version", "int64", True),
    ("exponents", "string", True),
    ("fingerprint", "uint64", True),
    ("sketch", "binary", True),
    ("mean", "float64", True),
    ("rms", "float64", True),
    ("kurtosis", "float64", True),
    ("beyond_6_sigma", "float64", True),
)
# Columns that files before the version of this number may lack; read there, they are null. A reader of version 4 passes
# over columns that it does not know, so `sketch` and those of Statistics did not raise the version.
ADDED = {"weight_version": 2, "exponents": 3, "fingerprint": 4, "sketch": 5} | dict.fromkeys(
    Statistics._fields, 5
)
STRINGS = tuple(name for name, kind, _ in COLUMNS if kind == "string")
_COUNTS = ("numel", "num_nan", "num_posinf", "num_neginf", "num_zero", "num_subnormal")

FACTS: dict[str, reading.Reader[Any]] = {
    "version": reading.count,
    "nanwatch": reading.text,
    "torch": reading.text,
    "rank": reading.count,
    "every": reading.count,
    "lost_frames": reading.count,
}


class TraceError(ValueError):
    """The file is no trace of a version that this nanwatch reads. The text names the file and the place in it.

    Examples:
        >>> import nanwatch, pathlib
        >>> size = pathlib.Path("run.parquet").write_text("no trace")
        >>> try:
        ...     nanwatch.Trace.open("run.parquet")
        ... except nanwatch.TraceError as error:
        ...     print(str(error).split(":")[0])
        run.parquet is no Parquet file that can be read
    """


def unreadable(message: str) -> TraceError:
    """Return a TraceError. Its message may quote a file from a stranger."""
    return TraceError(visible(message))


def parts_beside(path: Path) -> Path:
    """Return where the parts are while the one file takes their place."""
    return path.with_name(f"{path.name}.parts")


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


def facts_of(found: Any, where: str) -> dict[str, Any]:
    """Return the facts in the metadata of a schema. Raise TraceError unless it is a trace of a version read here."""
    text = (found.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise unreadable(f"{where} is no trace of nanwatch: its metadata lacks {METADATA_KEY.decode()!r}")
    try:
        facts = json.loads(text, parse_constant=reading.refuse_constant)
        if isinstance(facts, dict) and facts.get("version") not in READ_VERSIONS:
            raise ValueError(
                f"its version is {facts.get('version')!r}, this nanwatch reads versions"
                f" {READ_VERSIONS[0]} to {READ_VERSIONS[-1]}"
            )
        facts = reading.members(facts, "metadata", FACTS)
    except (ValueError, RecursionError) as error:
        raise unreadable(f"{where} is no trace that can be read: {error}") from error
    expected = schema()
    for field in expected:
        kinds = [found.field(i).type for i in found.get_all_field_indices(field.name)]
        if not kinds and facts["version"] < ADDED.get(field.name, 0):
            continue
        if kinds != [field.type]:
            got = ", ".join(map(str, kinds)) or "none"
            raise unreadable(f"{where}: column {field.name!r} should be one of {field.type}, got {got}")
    return facts


class Tabulator:
    """Maker of tables from the frames of one process. Counts the calls of each batch, and the changes of its weights.

    Somebody else reports steps to `versions`. Without it the ranges alone show changes.
    """

    # Frames of a batch may come late, recomputed in the backward or of a thread that others held up while they ran
    # hundreds of small batches; but not while so many others have frames.
    _BATCHES_REMEMBERED = 4096

    def __init__(self, rank: int, versions: WeightVersions | None = None) -> None:
        self._rank = rank
        self._versions = WeightVersions() if versions is None else versions
        self._calls: dict[int, int] = {}
        self._shapes: dict[tuple[int, ...], str] = {}

    def table(self, frames: Sequence[FrameRows]) -> Any:
        """Return one row a record, in the order of the frames; `frames` hold a record at least."""
        pa = import_module("pyarrow")
        rows = list(chain.from_iterable(frame.rows for frame in frames))
        label, role, shape, dtype, abs_min, abs_max, isfinite, health, note, bits, spread = zip(
            *rows, strict=True
        )
        counts = [len(frame.rows) for frame in frames]

        def each(values: Iterable[Any], kind: Any) -> Any:
            """Repeat a value of each frame for its rows."""
            of_frames = _strings(values) if kind is None else pa.array(values, kind)
            return of_frames.take(pa.array(np.repeat(np.arange(len(frames)), counts)))

        counted = [one for one in health if one is not None]
        columns = {
            "batch": each([frame.batch for frame in frames], pa.int64()),
            "call": each([self._call(frame.batch) for frame in frames], pa.int64()),
            "module": each([frame.name for frame in frames], None),
            "class": each([frame.class_name for frame in frames], None),
            "label": _strings(label),
            "role": _strings(role),
            "shape": _strings(map(self._shape, shape)),
            "dtype": _strings(name or None for name in dtype),
            "abs_min": pa.array(abs_min, pa.float64()),
            "abs_max": pa.array(abs_max, pa.float64()),
            "isfinite": pa.array(isfinite, pa.bool_()),
            "note": _strings(note),
            "phase": each([frame.phase for frame in frames], None),
            "recomputed": each([frame.recomputed for frame in frames], pa.bool_()),
            "rank": pa.array(np.full(len(rows), self._rank, np.int32)),
            "weight_version": pa.array(
                list(chain.from_iterable(map(self._versions.column, frames))), pa.int64()
            ),
            "fingerprint": pa.array(bits, pa.uint64()),
            "sketch": pa.array(map(take_sketch, rows), pa.binary()),
        }
        for name in Statistics._fields:
            columns[name] = pa.array([getattr(one, name, None) for one in spread], pa.float64())
        for name, kind, _ in COLUMNS:
            if name in columns:
                continue
            if not counted:
                columns[name] = pa.nulls(len(rows), pa.type_for_alias(kind))
            elif name == "first_nonfinite":
                places = (None if one is None else one.first_nonfinite for one in health)
                columns[name] = _strings(None if place is None else str(list(place)) for place in places)
            elif name == "exponents":
                columns[name] = _strings(map(_exponents, health))
            else:
                values = [None if one is None else getattr(one, name) for one in health]
                columns[name] = pa.array(values, pa.type_for_alias(kind))
        return pa.table(columns, schema=schema())

    def _call(self, batch: int) -> int:
        call = self._calls.pop(batch, 0)
        self._calls[batch] = call + 1  # at the end: the first one is the longest without a frame
        if len(self._calls) > self._BATCHES_REMEMBERED:
            del self._calls[next(iter(self._calls))]
        return call

    def _shape(self, shape: tuple[int, ...] | None) -> str | None:
        if shape is None:
            return None
        text = self._shapes.get(shape)
        if text is None:
            text = self._shapes[tuple(shape)] = str(list(shape))
            if len(self._shapes) > 4096:  # a new length of sequence in every batch
                self._shapes.clear()
        return text


def _exponents(health: TensorHealth | None) -> str | None:
    counts = getattr(health, "exponents", None)
    return None if counts is None else json.dumps(dict(counts))


def _strings(values: Iterable[str | None]) -> Any:
    pa = import_module("pyarrow")
    found = list(values)
    try:
        return pa.array(found, pa.string())
    except UnicodeEncodeError:  # a lone surrogate in somebody's name has no UTF-8
        return pa.array([None if one is None else with_utf8(one) for one in found], pa.string())


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
        records = tuple(_record(row) for row in rows[start:end])
        phase = reading.one_of(PHASES)(first["phase"], "phase")
        yield Frame(first["batch"], first["module"], first["class"], records, phase, first["recomputed"])
        start = end


def _record(row: dict[str, Any]) -> Record:
    return Record(
        label=row["label"],
        role=reading.one_of(ROLES)(row["role"], "role"),
        shape=sizes(row["shape"], "shape"),
        dtype=row["dtype"] or "",
        abs_min=row["abs_min"],
        abs_max=row["abs_max"],
        isfinite=row["isfinite"],
        health=None if row["numel"] is None else _health(row),
        note=row["note"],
        fingerprint=row["fingerprint"],
        statistics=None if row["mean"] is None else Statistics(*(row[name] for name in Statistics._fields)),
    )


def sizes(text: str | None, where: str) -> tuple[int, ...] | None:
    """Return the shape or index that is spelt so; None for None. Raise ValueError for other text."""
    if text is None:
        return None
    return reading.tuple_of(reading.count)(json.loads(text), where)


def _health(row: dict[str, Any]) -> TensorHealth:
    return TensorHealth(
        abs_min=row["abs_min"],
        abs_max=row["abs_max"],
        isfinite=row["isfinite"],
        finite_abs_min=row["finite_abs_min"],
        finite_abs_max=row["finite_abs_max"],
        first_nonfinite=sizes(row["first_nonfinite"], "first_nonfinite"),
        **{name: row[name] for name in _COUNTS},
    )


Key: TypeAlias = tuple[str, str]  # module and label

# Steps that wait for the frames of a later batch. In a run that is paused, or seldom recorded, the oldest are counted
# at once: no older frame is still to come.
_MOST_WAITING = 4096


class WeightVersions:
    """Counter of changes: of steps that took a weight, and of other changes that the weight's row shows.

    The training calls `step`. The writer calls `column`, with the frames in the order of their calls.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Collection[Key]]] = deque()
        self._counts: dict[Key, int] = {}
        # The last range of each weight, and its count then.
        self._seen: dict[Key, tuple[Any, int]] = {}
        # Not a plain lock: the garbage collector may run anybody's code within, and that may make a step.
        self._lock = threading.RLock()

    def step(self, batch: int, keys: Collection[Key]) -> None:
        """Count a step that took these, after batch `batch` had begun and before the next."""
        with self._lock:
            self._steps.append((batch, keys))
            while len(self._steps) > _MOST_WAITING:
                self._count()

    def column(self, frame: FrameRows) -> list[int | None]:
        """Return the number of changes before each row; None for rows that are no weight or buffer of a forward."""
        with self._lock:
            while self._steps and self._steps[0][0] < frame.batch:
                self._count()
        if frame.phase != "forward":
            return [None] * len(frame.rows)
        return [
            self._version(frame.name, row) if row.role in ("weight", "buffer") else None for row in frame.rows
        ]

    def _count(self) -> None:
        for key in self._steps.popleft()[1]:
            self._counts[key] = self._counts.get(key, 0) + 1

    def _version(self, module: str, row: Row) -> int:
        key = (module, row.label)
        # A nan differs from itself.
        range_ = tuple(None if x is None or isnan(x) else x for x in (row.abs_min, row.abs_max))
        now = (row.shape, row.dtype, *range_, row.isfinite, row.fingerprint)
        count = self._counts.get(key, 0)
        before = self._seen.get(key)
        if before is not None and before[1] == count and before[0] != now:
            count = self._counts[key] = count + 1
        self._seen[key] = (now, count)
        return count
