"""`watch(trace=...)`: what comes to the file is what the calls held, from every thread and batch, and nothing else."""

from __future__ import annotations

import copy
import gc
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nanwatch.records.record import Frame
from nanwatch.trace import trace_writer
from nanwatch.trace.trace_file import Trace
from support.architectures import built, inputs_of
from support.processes import until
from support.toys import Does, Scale, mlp
from support.watching import watch
from support.written_traces import batches


def traced(path: Path) -> list[Frame]:
    opened = Trace.open(path)
    return [frame for batch in opened.batches for frame in opened.frames(batch)]


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_a_trace_holds_every_frame_of_every_batch(tmp_path: Path, name: str) -> None:
    """The frames of the file are those of a watch that keeps all of its frames in memory."""
    model = copy.deepcopy(built(name)).eval()
    path = tmp_path / "run.parquet"
    with watch(model, trace=path, max_frames=5) as w, watch(model, max_frames=100_000) as oracle:
        for seed in range(6):
            model(**inputs_of(name, seed))
        assert len(w.frames) == 5
        kept = oracle.frames
        assert w.frames == kept[-5:]
    assert w.trace_path == path
    assert traced(path) == [frame for frame in kept if frame.records]


@pytest.mark.usefixtures("each_recorder")
def test_frames_beyond_the_ring_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is larger than the ring keeps its latest frames; the others are counted, and one warning says so."""
    monkeypatch.setattr(trace_writer, "_LEAST_RING", 10)
    monkeypatch.setattr(trace_writer.Tracer, "tick", lambda self: 30.0)  # the thread does not help

    def loop(step: nn.Module, x: Tensor) -> Tensor:
        for _ in range(49):
            x = step(x)
        return x

    model = Does(loop, Scale())
    w = watch(model, trace=tmp_path / "run.parquet", max_frames=3)

    def run() -> None:
        for _ in range(4):
            model(torch.ones(2))
        w.stop()

    with pytest.warns(RuntimeWarning, match="lacks frames"):
        run()
    opened = Trace.open(tmp_path / "run.parquet")
    assert len(traced(opened.path)) == 40
    assert opened.lost_frames == 4 * 50 - 40


@pytest.mark.usefixtures("each_recorder")
def test_a_watch_that_goes_away_with_its_model_leaves_a_whole_trace(tmp_path: Path) -> None:
    """Without stop(): the thread keeps neither the watch nor the model, and writes what there was."""
    model = mlp()
    gone = weakref.ref(model)
    w = watch(model, trace=tmp_path / "run.parquet")
    thread = w._tracer.writer._thread
    model(torch.ones(2, 3))
    del model, w
    gc.collect()
    assert gone() is None
    thread.join(20)
    assert (tmp_path / "run.parquet").is_file()
    assert [traced_frame.name for traced_frame in traced(tmp_path / "run.parquet")] == ["0", "1", "2", ""]


def test_a_disk_that_is_full_from_the_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is watched all the same; what else is wrong with a path is an error at once."""

    def full(path: Path) -> Path:
        raise OSError(28, "No space left on device", str(path))

    (tmp_path / "file").write_text("")
    model = mlp()
    with pytest.raises(ValueError, match="file"):
        watch(model, trace=tmp_path / "file" / "run.parquet")
    assert model[0]._compiled_call_impl is None
    monkeypatch.setattr(trace_writer, "claim", full)
    with pytest.warns(RuntimeWarning, match="there is no trace"):
        w = watch(model, trace=tmp_path / "run.parquet")
    model(torch.ones(2, 3))
    w.stop()
    assert w.trace_path is None
    assert len(w.frames) == 4


def test_ranks_write_traces_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun's environment the rank is in the name and in the rows."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    model = mlp()
    with watch(model, trace=tmp_path / "run.parquet") as w:
        model(torch.ones(2, 3))
    assert w.trace_path == tmp_path / "run-rank3.parquet"
    assert Trace.open(tmp_path / "run-rank3.parquet").rank == 3


RUN = """
import sys, time, torch
from torch import nn
import nanwatch
model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
watch = nanwatch.watch(model, trace=sys.argv[1])
for batch in range(1_000_000):
    model(torch.ones(2, 3))
    if batch == 99:
        print("go", flush=True)
    time.sleep(0.001)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_what_was_written(tmp_path: Path) -> None:
    """After a SIGKILL in the middle of a run the path is a folder that pyarrow reads: whole calls, in order."""
    path = tmp_path / "run.parquet"
    command = [sys.executable, "-c", RUN, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
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
