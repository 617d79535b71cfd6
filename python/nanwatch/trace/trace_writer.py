"""Thread that writes a trace to disk, part by part, so that a process may be killed at any moment.

A Parquet file has its index at its end. One that is not closed cannot be read. So while a run lasts, its trace is a
folder of whole files: the writer writes the latest part anew, with what has come since, to a file beside the folder,
and renames it over the part before. A part with PART_ROWS rows is final, and the next begins. pandas, polars and
pyarrow read such a folder as they read one file. At the end it becomes one file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..recording.observe import take_sketch
from ..util.messages import spell, warn_user
from . import columns
from .columns import SUFFIX

if TYPE_CHECKING:
    from ..records.record import Frame

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
_MAX_NUMBERED = 10_000


def claim(path: Path) -> Path:
    """Make a folder at `path`, named like the file; where that is taken, at the first free of `name-1`, `name-2`."""
    stem = path.name.removesuffix(SUFFIX)
    for number in range(_MAX_NUMBERED):
        place = path.with_name(f"{stem}-{number}{SUFFIX}" if number else f"{stem}{SUFFIX}")
        try:
            place.mkdir()
        except FileExistsError:
            continue
        return place
    raise FileExistsError(f"{path} and {_MAX_NUMBERED - 1} numbered after it are taken")


class TraceWriter:
    """Takes frames and writes them, in a thread of its own. `put` and `close` never raise and never wait for long.

    `folder` is as `claim` left it, and one file after `close`. `facts` are those of the format. The thread calls
    `tick` to be handed what is not handed over yet; it returns in how many seconds to call it again.
    What goes wrong is one warning, and the end of the trace; what is on disk by then stays.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], tick: Callable[[], float]) -> None:
        self.path = folder
        self._facts = facts
        self._tick = tick
        self._temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        self._tabulator = columns.Tabulator(facts["rank"])
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
                warn_user(
                    f"nanwatch: the trace {self.path} was not whole on disk after {seconds:.0f} s; it can be read up to"
                    " the last part written",
                    may_raise=False,
                )

    # The thread runs the methods below.

    def _run(self) -> None:
        try:
            self._serve()
            if self._part == 0 and not self._tables:
                self._tables.append(columns.schema().empty_table())
            self._flush()
            self._become_file()
        except BaseException as error:  # not one line of it may reach the run
            self._failed = True
            with self._condition:
                self._waiting.clear()
            self._tables.clear()
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            warn_user(
                f"nanwatch: the trace {self.path} ends here, as it could not be written ({spell(error)}); what was"
                " written before can be read, and the run goes on without a trace",
                may_raise=False,
            )
        finally:
            atexit.unregister(self.close)

    def _serve(self) -> None:
        """Write parts until the end is asked for and nothing waits."""
        flushed, interval = monotonic(), _LEAST_SECONDS
        dirty = False
        until_tick = 0.0
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
                warn_user(
                    f"nanwatch: the trace {self.path} lacks frames that came faster than they could be taken or"
                    " written; their number is in the file's metadata. every= or Trace(batches=) trace fewer batches",
                    may_raise=False,
                )
            if ends and not frames:
                return
            now = monotonic()
            if self._is_full or (dirty and now - flushed >= interval):
                self._flush()
                dirty = False
                flushed = monotonic()
                interval = min(max(_LEAST_SECONDS, _SHARE * (flushed - now)), FLUSH_SECONDS)
            if not ends:
                until_tick = self._tick()

    @property
    def _is_full(self) -> bool:
        return self._rows >= PART_ROWS or self._bytes >= PART_BYTES

    def _flush(self) -> None:
        """Put the latest part in its place, whole."""
        if not self._tables:
            return
        pa = columns.arrow("pyarrow", "trace=")
        table = pa.concat_tables(self._tables)
        self._tables = [table]
        write_table(table.replace_schema_metadata(columns.schema(self._facts).metadata), self._temporary)
        self._temporary.replace(self.path / f"part-{self._part:05}{SUFFIX}")
        if self._is_full:
            self._part, self._rows, self._bytes = self._part + 1, 0, 0
            self._tables = []

    def _become_file(self) -> None:
        """Make one file in place of the folder, if time is left."""
        parquet = columns.arrow("pyarrow.parquet", "trace=")
        parts = sorted(self.path.glob(f"part-*{SUFFIX}"))
        with parquet.ParquetWriter(self._temporary, columns.schema(self._facts), **_HOW) as file:
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
    columns.arrow("pyarrow.parquet", "trace=").write_table(table, path, **_HOW)
