"""A trace of a process that is killed, or ends without stop()."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanwatch.trace.trace_file import Trace
from support.processes import until
from support.written_traces import batches

parquet = pytest.importorskip("pyarrow.parquet")


RUN = """
import sys, time, torch
from torch import nn
import nanwatch
model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
watch = nanwatch.watch(model, trace=sys.argv[1])
for batch in range(int(sys.argv[2])):
    model(torch.ones(2, 3))
    if batch == 99:
        print("go", flush=True)
    time.sleep(float(sys.argv[3]))
"""


def run(path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_process_leaves_what_was_written(tmp_path: Path) -> None:
    """After a SIGKILL in the middle of a run the path is a folder that pyarrow reads: whole calls, in order."""
    path = tmp_path / "run.parquet"
    with run(path, "1000000", "0.001") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "go\n"
            first = path / "part-00000.parquet"
            until(first.exists)
            before = first.stat().st_mtime_ns
            until(lambda: first.stat().st_mtime_ns != before)  # and so at least once over itself
        finally:
            process.send_signal(signal.SIGKILL)
    numbers = batches(path)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(max(numbers) + 1))
    assert max(numbers) >= 50
    frames = Trace.open(path).frames(50)
    assert [frame.name for frame in frames] == ["0", "1", ""]
