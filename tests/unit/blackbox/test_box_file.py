"""The reader has what was written, also while it is written, and refuses what was damaged."""

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.blackbox.story import BoxFile
from nanwatch.blackbox.story import read as read_black_box
from support.black_boxes import black_box, needs_box
from support.processes import until

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
    path, pipe = tmp_path / "x.blackbox", tmp_path / "pipe"
    model = nn.ReLU()
    with black_box(tmp_path) as box, watch(model, black_box=True):
        model(torch.ones(1))
        content = box.path.read_bytes()
    for length in (0, 100, 5000, len(content) // 2):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=str(path)):
            read_black_box(path)
    path.write_text("a text\n")
    os.mkfifo(pipe)
    for file, words in ((path, "cannot be read as a black box.* begins with"), (pipe, "is no regular file")):
        with pytest.raises(ValueError, match=f"{file} {words}"):
            read_black_box(file)
    with pytest.raises(FileNotFoundError):
        read_black_box(tmp_path / "none")
