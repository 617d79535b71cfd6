"""Writer of traces: the Tracer takes frames out of a recorder, and a thread writes them to disk, part by part.

A process may be killed at any moment, and a Parquet file has its index at its end: one that is not closed cannot be
read. So while a run lasts, its trace is a folder of whole files: the writer writes the latest part anew, with what has
come since, to a file beside the folder, and renames it over the part before. A part with PART_ROWS rows is final, and
the next begins. pandas, polars and pyarrow read such a folder as they read one file. At the end it becomes one file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from errno import EDQUOT, ENOSPC
from importlib import import_module
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import nn

from .._version import __version__
from ..instrumentation.global_hooks import weakly
from ..recording.events import Recorder
from ..recording.observe import take_sketch
from ..records.fields import columns_of
from ..records.record import Frame, Record
from ..util.job import rank_and_world_size
from ..util.messages import spell, warn_user, with_utf8
from ..util.program import each_module
from .trace_file import SUFFIX, VERSION, Facts, arrow, schema

# A frame takes 3.4 µs to fetch, while nobody else runs Python. So the recorder holds several batches, and is asked when
# it is nearly full, or once a second.
_LEAST_RING = 1024
_RING_PER_MODULE = 3
_GATHER_SECONDS = 1.0
# Batches that are larger than was thought, as the loops of a model may make them, are watched more closely.
_HURRIED_SECONDS = 0.02
# Written anew with every flush: 32 Ki rows took 0.04 s.
PART_ROWS = 32_768
# A kill loses at most this many seconds. Where all cores compute, a step waits for whatever runs beside it: writing
# takes at most a 200th of the time of a core.
FLUSH_SECONDS = 10.0
_LEAST_SECONDS = 1.0
_SHARE = 200
# Rows that may wait for the disk; a row takes 440 bytes. A sketch counts for as many rows as it has such bytes.
MAX_WAITING_ROWS = 262_144
_ROW_BYTES = 440
# The most of a part with sketches.
PART_BYTES = 32 << 20
CLOSE_SECONDS = 10.0


def ring_size(model: nn.Module) -> int:
    """Return how many frames the recorder should hold while every batch of this model is traced."""
    return max(_LEAST_RING, _RING_PER_MODULE * sum(1 for _ in each_module(model)))


def start_tracer(trace: Any, recorder: Recorder, ring: int, every: int) -> Tracer | None:
    """Make the Tracer of a nanwatch.Trace; None, with a warning, where the disk is full. Other errors are raised."""
    (rank, world_size), path = rank_and_world_size(), trace.path
    if world_size > 1:
        path = path.with_name(f"{path.name.removesuffix(SUFFIX)}-rank{rank}{SUFFIX}")
    try:
        facts = Facts(VERSION, __version__, str(torch.__version__), rank, every, lost_frames=0)
        return Tracer(path, recorder, ring, trace.batches, facts)
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        warn_user(f"nanwatch: there is no trace, as {error}; the run goes on")
        return None


class Tracer:
    """The training's side of a trace, which hands frames over and does not wait.

    `ring` is how many frames the recorder holds. The frames of chosen `batches` are not fetched but given to `add`.
    """

    def __init__(self, path: Path, recorder: Recorder, ring: int, batches: Any, facts: Facts) -> None:
        self._recorder, self._batches, self._ring = recorder, batches, 0 if batches else ring
        self._given: list[Frame] = []
        self._taken = 0  # how many frames there had been when they were last fetched
        self._ended = 0  # and when the latest batch had ended
        self._largest = 0  # batch, in frames
        self._fetched = monotonic()
        # The garbage collector may run anybody's code while the lock is held, and that may call the model.
        self._lock = threading.RLock()
        self._gathers = False
        arrow("pyarrow.parquet", "trace=")
        # The thread must not keep the watch.
        self.writer = TraceWriter(claim(path), facts._asdict(), weakly(self.tick))
        self._at_exit = weakly(self.close)
        atexit.register(self._at_exit)

    def add(self, frame: Frame) -> None:
        """Take a frame, if its batch was chosen."""
        if frame.batch in self._batches:
            self._given.append(frame)

    def note(self, frame: Frame) -> None:
        """Take a frame that no call made, behind those that there are, unless its batch was not chosen."""
        if not self._batches or frame.batch in self._batches:
            self.gather()
            self.writer.put([frame])

    def batch_ended(self) -> None:
        """Take the frames of the batch if the recorder has no room for those of another one."""
        if self._ring == 0 or not self.writer.is_open:
            self.gather()
            return
        num_kept = self._recorder.frames_kept
        self._largest = max(self._largest, num_kept - self._ended)
        self._ended = num_kept
        if num_kept - self._taken + self._largest > self._ring:
            self.gather()

    def tick(self) -> float:
        """Take the frames if it is time. Return in how many seconds to call again. The writing thread calls this."""
        hurries = self._ring > 0 and (self._largest == 0 or 2 * self._largest > self._ring)
        waiting = self._recorder.frames_kept - self._taken if self._ring else len(self._given)
        is_late = monotonic() - self._fetched >= _GATHER_SECONDS
        if waiting and (is_late or (hurries and 2 * waiting > self._ring)):
            self.gather()
        return _HURRIED_SECONDS if hurries else _GATHER_SECONDS

    def gather(self) -> None:
        """Hand over all frames that there are."""
        if not self.writer.is_open:
            self._given.clear()
            return
        with self._lock:
            if self._gathers:  # called within: what is new is for the next time
                return
            self._gathers, self._fetched = True, monotonic()
            try:
                if self._ring == 0:
                    frames, self._given = self._given, []
                else:
                    num_made, frames = self._recorder.frames_since(self._taken)
                    self.writer.lose(num_made - self._taken - len(frames))
                    self._taken = num_made
                self.writer.put(frames)
            finally:
                self._gathers = False

    def close(self, *, waits: bool = True) -> None:
        """Hand over the last frames and wait, not for long, until they are on disk. A second time does nothing."""
        atexit.unregister(self._at_exit)
        self.gather()
        self.writer.close(waits=waits)

    def __del__(self) -> None:
        # The watch went away with its model, without stop(). The thread goes on until all is written.
        if hasattr(self, "_at_exit"):
            self.close(waits=False)


# To the disk.


def claim(path: Path) -> Path:
    """Make a folder at `path`, named like the file; where that is taken, at the first free of `name-1`, `name-2`."""
    stem, number = path.name.removesuffix(SUFFIX), 0
    while True:
        place = path.with_name(f"{stem}-{number}{SUFFIX}" if number else f"{stem}{SUFFIX}")
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            return place
        number += 1


class TraceWriter:
    """Takes frames and writes them, in a thread of its own. `put` and `close` never raise and never wait for long.

    `folder` is as `claim` left it, and one file after `close`. `facts` are those of the format. The thread calls
    `tick` to be handed what is not handed over yet; it returns in how many seconds to call it again, None at the end.
    What goes wrong is one warning, and the end of the trace; what is on disk by then stays.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], tick: Callable[[], float | None]) -> None:
        self.path = folder
        self._facts = facts
        self._tick = tick
        self._temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        self._tabulator = Tabulator(facts["rank"])
        self._waiting: deque[list[Frame]] = deque()
        self._waiting_rows = 0
        self._tables: list[Any] = []  # of the latest part
        self._part, self._rows, self._bytes = 0, 0, 0
        self._failed = self._told_of_loss = False
        self._deadline: float | None = None  # set when the end was asked for
        self._condition = threading.Condition()
        # A forked child has this object but not the thread, and locks in any state.
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="nanwatch trace", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Return whether frames that are put here still go to disk."""
        return not self._failed and self._deadline is None and self._process == os.getpid()

    def put(self, frames: Sequence[Frame]) -> None:
        """Add frames, in the order of their calls. Where the disk is too slow for them they are counted as lost."""
        frames = [frame for frame in frames if frame.records]
        if not frames or not self.is_open:
            return
        records = [record for frame in frames for record in frame.records]
        rows = sum(1 + len(getattr(record, "sketch", b"")) // _ROW_BYTES for record in records)
        with self._condition:
            if self._waiting_rows + rows > MAX_WAITING_ROWS:
                self._facts["lost_frames"] += len(frames)
                for record in records:
                    take_sketch(record)
            else:
                self._waiting.append(frames)
                self._waiting_rows += rows
            self._condition.notify()

    def lose(self, frames: int) -> None:
        """Count frames that never came here."""
        if frames > 0 and self.is_open:
            with self._condition:
                self._facts["lost_frames"] += frames
                self._condition.notify()

    def close(self, seconds: float = CLOSE_SECONDS, *, waits: bool = True) -> None:
        """Write what was put, within so many seconds, and end. Unless it `waits`, the thread does so later.

        A second time it may still wait.
        """
        if self._process != os.getpid():
            return
        with self._condition:
            if self._deadline is None:
                self._deadline = monotonic() + seconds
            self._condition.notify()
        if waits and self._thread is not threading.current_thread():
            self._thread.join(seconds)
            if self._thread.is_alive():
                late = f"the trace {self.path} was not whole on disk after {seconds:.0f} s"
                hint = "it can be read up to the last part written"
                warn_user(f"nanwatch: {late}; {hint}", may_raise=False)

    # The thread runs the methods below.

    def _run(self) -> None:
        try:
            self._serve()
            if self._part == 0 and not self._tables:
                self._tables.append(schema().empty_table())
            self._flush()
            self._become_file()
        except BaseException as error:  # not one line of it may reach the run
            self._failed = True
            with self._condition:
                self._waiting.clear()
            self._tables.clear()
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            why = f"the trace {self.path} ends here, as it could not be written ({spell(error)})"
            after = "what was written before can be read, and the run goes on without a trace"
            warn_user(f"nanwatch: {why}; {after}", may_raise=False)
        finally:
            atexit.unregister(self.close)

    def _serve(self) -> None:
        """Write parts until the end is asked for and nothing waits."""
        flushed, interval, until_tick, dirty = monotonic(), _LEAST_SECONDS, 0.0, False
        while True:
            with self._condition:
                if not self._waiting and self._deadline is None:
                    self._condition.wait(until_tick)
                frames = [frame for waiting in self._waiting for frame in waiting]
                self._waiting.clear()
                self._waiting_rows = 0
                ends = self._deadline is not None
            if frames:
                self._tables.append(self._tabulator.table(frames))
                self._rows += self._tables[-1].num_rows
                self._bytes += self._tables[-1]["sketch"].nbytes
                dirty = True
            if self._facts["lost_frames"] and not self._told_of_loss:
                self._told_of_loss = True
                lost = (
                    f"the trace {self.path} lacks frames that came faster than they could be taken or written"
                )
                hint = "their number is in the file's metadata. every= or Trace(batches=) trace fewer batches"
                warn_user(f"nanwatch: {lost}; {hint}", may_raise=False)
            if ends and not frames:
                return
            now = monotonic()
            if self._is_full or (dirty and now - flushed >= interval):
                self._flush()
                dirty, flushed = False, monotonic()
                interval = min(max(_LEAST_SECONDS, _SHARE * (flushed - now)), FLUSH_SECONDS)
            if not ends:
                until_tick = self._tick() or _GATHER_SECONDS

    @property
    def _is_full(self) -> bool:
        return self._rows >= PART_ROWS or self._bytes >= PART_BYTES

    def _flush(self) -> None:
        """Put the latest part in its place, whole."""
        if not self._tables:
            return
        pa = arrow("pyarrow", "trace=")
        table = pa.concat_tables(self._tables)
        self._tables = [table]
        write_table(table.replace_schema_metadata(schema(self._facts).metadata), self._temporary)
        self._temporary.replace(self.path / f"part-{self._part:05}{SUFFIX}")
        if self._is_full:
            self._part, self._rows, self._bytes = self._part + 1, 0, 0
            self._tables = []

    def _become_file(self) -> None:
        """Make one file in place of the folder, if time is left."""
        parquet = arrow("pyarrow.parquet", "trace=")
        parts = sorted(self.path.glob(f"part-*{SUFFIX}"))
        with parquet.ParquetWriter(self._temporary, schema(self._facts), **_HOW) as file:
            for part in parts:
                if self._deadline is not None and monotonic() > self._deadline:
                    break
                file.write_table(parquet.read_table(part).replace_schema_metadata(file.schema.metadata))
            else:
                parts = []
        if parts:
            self._temporary.unlink()
            return
        aside = self.path.with_name(f"{self.path.name}.parts")
        self.path.rename(aside)
        self._temporary.rename(self.path)
        shutil.rmtree(aside, ignore_errors=True)


_HOW: dict[str, Any] = {"compression": "zstd", "store_schema": True}


def write_table(table: Any, path: Path) -> None:
    """Write one file. Raise OSError where that fails."""
    arrow("pyarrow.parquet", "trace=").write_table(table, path, **_HOW)


# Frames as rows.


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
        for column in columns_of(Frame):
            columns[column.name] = _column(column.kind, column.cells(values[column.field])).take(place)
        values = dict(zip(Record._fields, zip(*rows, strict=True), strict=True))
        for column in columns_of(Record):
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
