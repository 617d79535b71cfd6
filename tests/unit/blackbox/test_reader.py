"""The reader has what was written, also while it is written, says where a process is, and refuses what was damaged."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.blackbox.reader import BlackBoxReport, BoxFile, Job, read_job
from nanwatch.blackbox.reader import read as read_black_box
from support.black_boxes import black_box, needs_box, other
from support.processes import until
from support.toys import Does

pytestmark = needs_box


def ended_calls(file: BoxFile) -> list[tuple[str, int]]:
    """Return the names and batches of the calls in the file, oldest first."""
    return [(file.module(int(call["module"]))[0], int(call["batch"])) for call in file.calls]


def test_the_calls_are_those_that_hooks_see(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    log: list[tuple[str, int]] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: log.append((name, batch[0])))  # type: ignore[misc]
    batch = [0]
    with black_box(tmp_path) as box, watch(model, black_box=True):
        for batch[0] in range(5):
            model(torch.ones(3, 4))
        assert ended_calls(BoxFile(box.path)) == log


def test_the_latest_calls_outlive_the_ring(tmp_path: Path) -> None:
    model, x, count = nn.Identity(), torch.ones(1), (1 << 15) + 100
    with black_box(tmp_path) as box, watch(model, black_box=True):
        for _ in range(count):
            model(x)
        file = BoxFile(box.path)
    batches = [batch for _, batch in ended_calls(file)]
    assert len(batches) >= 20_000
    assert batches == list(range(count - len(batches), count))


def test_what_is_read_while_it_is_written_is_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    names = {name for name, _ in model.named_modules()}
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            model(torch.ones(2, 4))

    with black_box(tmp_path) as box, watch(model, black_box=True):
        writer = threading.Thread(target=write)
        writer.start()
        try:
            until(lambda: BoxFile(box.path).state["calls"])
            for _ in range(10):
                file = BoxFile(box.path)
                times = file.calls["ended"].tolist()
                assert times
                assert times == sorted(times)
                assert (file.calls["begun"] <= file.calls["ended"]).all()
                assert {name for name, _ in ended_calls(file)} <= names
        finally:
            ended.set()
            writer.join()


def test_truncated_and_foreign_files_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "x.blackbox"
    model = nn.ReLU()
    with black_box(tmp_path) as box, watch(model, black_box=True):
        model(torch.ones(1))
        content = box.path.read_bytes()
    for length in (0, 100, 5000, len(content) // 2):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=str(path)):
            read_black_box(path)
    path.write_text("a text\n")
    with pytest.raises(ValueError, match=f"{path} cannot be read as a black box.* begins with"):
        read_black_box(path)
    with pytest.raises(FileNotFoundError):
        read_black_box(tmp_path / "none")


# Where the process is: read by itself in the middle of a forward, a backward and a step.


def calls(function: Any) -> nn.Module:
    """Return a Linear that calls a function in its forward."""
    return Does(lambda linear, x: (linear(x), function())[0], nn.Linear(4, 4))


def test_each_phase_is_told(tmp_path: Path) -> None:
    """In a backward, the innermost module that runs."""
    seen: list[BlackBoxReport] = []

    def look(*_: object) -> None:
        seen.append(read_black_box(box.path))

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), calls(look))
    steps = torch.optim.SGD(model.parameters())
    with black_box(tmp_path) as box, watch(model, black_box=True, gradients=True):
        look()
        model[0].register_forward_hook(lambda module, given, y: y.grad_fn.register_prehook(look) and None)
        for _ in range(2):
            y = model(torch.ones(2, 4))
            look()
            y.sum().backward()
            look()
            steps.step(lambda: look() or 0.0)  # type: ignore[func-returns-value, arg-type]
    begin, batches = seen[0], (seen[1:6], seen[6:11])
    assert (begin.phase, begin.batch, begin.num_calls) == ("", None, 0)
    for batch, (forward, after, backward, between, step) in enumerate(batches):
        assert (forward.phase, forward.batch, forward.under_way.module) == ("forward", batch, "1")
        assert (after.phase, after.batch, after.num_calls) == ("", batch, 5 * (batch + 1))
        assert (backward.phase, backward.batch) == ("backward", batch)
        assert (backward.gradient, between.phase) == (("0.0", "output"), "")
        assert (step.phase, step.batch, step.end) == ("step", batch, "runs")


def test_an_exception_is_placed_in_the_innermost_call_that_it_left(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), calls(lambda: 1 / 0))
    with black_box(tmp_path) as box, watch(model, black_box=True):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4))
        report = read_black_box(box.path)
    text = Job((replace(report, end="exception"),)).to_text()
    assert "Where:   batch 0, forward: 1 (Does) raised.\n" in text


def test_a_killed_process_runs_no_longer_before_its_parent_asks(tmp_path: Path) -> None:
    """Nobody may have waited for it: its number is still taken."""
    pid = os.fork()
    if pid == 0:
        try:
            watch(nn.Linear(2, 2), output_dir=tmp_path)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    (path,) = tmp_path.glob(f"blackbox/*-{pid}-*")
    try:
        assert read_black_box(path).end == "unknown"
    finally:
        os.waitpid(pid, 0)


# Ranks of a job: copies of one black box, with other ranks, processes and counts.


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A black box of rank 0 of 3 inside of its second batch."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    copy = tmp_path / "source"
    with black_box(tmp_path / "own") as box, watch(model, black_box=True):
        model(torch.ones(1, 2))
        model[1].register_forward_pre_hook(lambda *_: copy.write_bytes(box.path.read_bytes()) and None)
        model(torch.ones(1, 2))
    return copy


def change(path: Path, **numbers: int) -> None:
    """Change words of the state."""
    box = BoxFile(path)
    with path.open("r+b") as file:
        for name, number in numbers.items():
            file.seek(box._places["state"] + 8 * list(box.state).index(name))
            file.write(number.to_bytes(8, "little", signed=True))


def test_the_rank_that_died_is_first(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (folder / "blackbox").mkdir(parents=True)
    for rank in range(3):
        copy = other(source, folder / "blackbox" / f"{rank}.blackbox", rank=str(rank))
        if rank == 1:
            change(copy, signal=11, signal_ticks=BoxFile(copy).state["latest"], pid=1 << 30)
    os.truncate(other(source, folder / "blackbox" / "short.blackbox"), 5000)
    job = read_job(folder)
    text = job.to_text()
    assert "Rank 1 ended first: signal 11 (SIGSEGV)" in text
    assert "2 of the others: batch 1, forward: inside 1 (ReLU)" in text
    assert "Not read: " in text
    document = json.loads(job.to_json())
    assert (document["schema"], document["first"]) == ("nanwatch.blackbox.job", 1)
    assert [rank["schema"] for rank in document["ranks"]] == ["nanwatch.blackbox"] * 3


def test_the_rank_that_is_behind_is_first_while_all_run(source: Path, tmp_path: Path) -> None:
    for rank in range(3):
        other(source, tmp_path / f"{rank}.blackbox", rank=str(rank))
    assert read_job(tmp_path).first is None
    change(tmp_path / "2.blackbox", calls=2)
    assert "Rank 2 is behind the others: it runs" in read_job(tmp_path).to_text()


def test_an_end_without_a_mark_may_be_later_than_its_sign_of_life(source: Path) -> None:
    report = read_black_box(source)
    killed = replace(report, rank=0, end="unknown", latest=10.0)
    for latest, first in ((11.0, 1), (12.0, 0)):
        assert Job((killed, replace(report, rank=1, end="signal", latest=latest))).first.rank == first
