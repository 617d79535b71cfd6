"""The reader has what was written, also while it is written, and refuses what was damaged."""

from __future__ import annotations

import os
import random
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
    """Names and batches, in the order in which calls end."""
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
    """The latest 20,000 at least, without a gap."""
    model, x, count = nn.Identity(), torch.ones(1), (1 << 15) + 100
    with black_box(tmp_path) as box, watch(model, black_box=True):
        for _ in range(count):
            model(x)
        file = BoxFile(box.path)
    batches = [batch for _, batch in ended_calls(file)]
    assert len(batches) >= 20_000
    assert batches == list(range(count - len(batches), count))


def test_what_is_read_while_it_is_written_is_whole(tmp_path: Path) -> None:
    """Calls in their order, of modules that there are."""
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
            for _ in range(30):
                file = BoxFile(box.path)
                times = file.calls["ended"].tolist()
                assert times
                assert times == sorted(times)
                assert (file.calls["begun"] <= file.calls["ended"]).all()
                assert {name for name, _ in ended_calls(file)} <= names
        finally:
            ended.set()
            writer.join()


def test_damaged_and_foreign_files_give_an_answer_or_a_clear_error(tmp_path: Path) -> None:
    """Each error names the file."""
    path, pipe = tmp_path / "x.blackbox", tmp_path / "pipe"
    model = nn.ReLU()
    with black_box(tmp_path) as box, watch(model, black_box=True):
        model(torch.ones(1))
        content = box.path.read_bytes()
    chance, refused, read = random.Random(0), 0, 0
    for number in range(60):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 3, 20))):
            damaged[chance.randrange(chance.choice((2000, 5000, 60000)))] = chance.randrange(256)
        path.write_bytes(damaged[: len(damaged) if number % 3 else chance.randrange(len(damaged))])
        try:
            read_black_box(path)
        except ValueError as error:
            refused += str(path) in str(error)
        else:
            read += 1
    assert refused + read == 60
    assert read < refused
    path.write_text("a text\n")
    os.mkfifo(pipe)
    for file, words in ((path, "cannot be read as a black box.* begins with"), (pipe, "is no regular file")):
        with pytest.raises(ValueError, match=f"{file} {words}"):
            read_black_box(file)
    with pytest.raises(FileNotFoundError):
        read_black_box(tmp_path / "none")
