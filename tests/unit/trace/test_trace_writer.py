"""The writing thread: parts, the one file, what goes wrong with a disk, and how little a step has to do with it."""

import errno
import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from nanwatch.records.record import Frame, Record
from nanwatch.trace import trace_writer
from nanwatch.trace.trace_file import Trace
from nanwatch.trace.trace_writer import TraceWriter, claim
from support.processes import until
from support.written_traces import FACTS, batches

parquet = pytest.importorskip("pyarrow.parquet")


def frame(batch: int, rows: int = 1) -> Frame:
    records = (Record(f"input[{i}]", "input", (2, 3), "float32", 0.5, 1.5, True, None) for i in range(rows))
    return Frame(batch, "layer", "Linear", tuple(records))


def writer(path: Path) -> TraceWriter:
    return TraceWriter(claim(path), dict(FACTS), lambda: 1.0)


def test_many_parts_are_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part ends when it is full; the file is made of them, with a row group each."""
    monkeypatch.setattr(trace_writer, "PART_ROWS", 10)
    place = tmp_path / "run.parquet"
    trace = writer(place)
    for batch in range(35):
        trace.put([frame(batch)])
        if batch % 5 == 4:  # let the thread take them before the next come
            until(lambda: not trace._waiting)
    trace.close()
    assert batches(place) == list(range(35))
    assert parquet.ParquetFile(place).num_row_groups > 1
    assert len(list(tmp_path.iterdir())) == 1


def test_no_earlier_trace_is_touched(tmp_path: Path) -> None:
    """A path that is taken, by a file, a folder or a killed run, gets the next number."""
    assert claim(tmp_path / "killed") == tmp_path / "killed.parquet"
    assert claim(tmp_path / "killed.parquet") == tmp_path / "killed-1.parquet"
    (tmp_path / "run.parquet").write_text("mine")
    assert claim(tmp_path / "run.parquet") == tmp_path / "run-1.parquet"
    assert (tmp_path / "run.parquet").read_text() == "mine"


def test_a_disk_that_fails_is_one_warning_and_the_parts_before_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer, "_LEAST_SECONDS", 0.0)
    trace = writer(tmp_path / "run.parquet")
    trace.put([frame(0)])
    part = tmp_path / "run.parquet" / "part-00000.parquet"
    until(part.exists)
    write = trace_writer.write_table

    def full(table: Any, path: Path) -> None:
        write(table, path)
        path.write_bytes(path.read_bytes()[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(trace_writer, "write_table", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in range(1, 20):
            trace.put([frame(batch)])
            time.sleep(0.002)
        until(lambda: not trace.is_open)
        trace.put([frame(20)])
        trace.close()
    assert len(caught) == 1
    assert os.strerror(errno.ENOSPC) in str(caught[0].message)
    assert "the run goes on" in str(caught[0].message)
    assert batches(tmp_path / "run.parquet") == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["run.parquet"]


def test_a_slow_disk_costs_frames_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk takes nothing, puts beyond the limit return at once and are counted, with one warning."""
    release, write = threading.Event(), trace_writer.write_table

    def slow(table: Any, path: Path) -> None:
        release.wait(30)
        write(table, path)

    monkeypatch.setattr(trace_writer, "write_table", slow)
    monkeypatch.setattr(trace_writer, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(trace_writer, "MAX_WAITING_ROWS", 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = writer(tmp_path / "run.parquet")
        trace.put([frame(0)])
        until(lambda: not trace._waiting)  # taken, and stuck in the write from here on
        for batch in range(1, 300):
            trace.put([frame(batch, 2)])
        assert trace._waiting_rows <= 100
        release.set()
        trace.close()
    written = Trace.open(tmp_path / "run.parquet")
    assert written.batches == tuple(range(51))
    assert written.lost_frames == 300 - 51
    assert len(caught) == 1
    assert "lacks frames" in str(caught[0].message)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    trace = writer(tmp_path / "run.parquet")
    trace.put([frame(0)])

    def in_child() -> None:
        trace.put([frame(1)])
        trace.lose(5)
        trace.close()
        os._exit(int(trace.is_open))

    child = multiprocessing.get_context("fork").Process(target=in_child, daemon=True)
    with trace._condition:  # as a fork may catch it
        child.start()
    child.join(20)
    assert child.exitcode == 0
    trace.close()
    written = Trace.open(tmp_path / "run.parquet")
    assert (written.batches, written.lost_frames) == ((0,), 0)
