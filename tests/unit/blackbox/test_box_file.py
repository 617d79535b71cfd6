"""The reader has what was written, also while it is written, and refuses what was damaged."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.blackbox.box_file import BoxFile
from nanwatch.blackbox.story import read as read_black_box
from support.black_boxes import black_box, needs_box, until

pytestmark = needs_box


def ended_calls(file: BoxFile) -> list[tuple[str, int]]:
    """Return the names and batches of the calls in the file, oldest first."""
    return [(file.name(int(one["module"])).partition("\n")[0], int(one["batch"])) for one in file.calls]


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
    model = nn.Identity()
    count = (1 << 15) + 100
    x = torch.ones(1)
    with black_box(tmp_path) as box, watch(model, black_box=True):
        for _ in range(count):
            model(x)
        file = BoxFile(box.path)
    batches = [batch for _, batch in ended_calls(file)]
    assert file.state["calls"] == count
    assert len(batches) >= 20_000
    assert batches == list(range(count - len(batches), count))


def test_what_is_read_while_it_is_written_is_whole(tmp_path: Path) -> None:
    """Calls in their order, frames of modules that there are."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    names = {name: type(module).__name__ for name, module in model.named_modules()}
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
                assert {name for name, _ in ended_calls(file)} <= names.keys()
                for frame in read_black_box(box.path).frames:
                    assert names[frame.name] == frame.class_name
                    assert [record.shape for record in frame.records if record.role == "output"] == [(2, 4)]
        finally:
            ended.set()
            writer.join()


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Each with what it is."""
    file, pipe = tmp_path / "text", tmp_path / "pipe"
    file.write_text("a text\n")
    with pytest.raises(ValueError, match=f"{file} is no black box of this version"):
        BoxFile(file)
    os.mkfifo(pipe)
    with pytest.raises((ValueError, OSError)):
        BoxFile(pipe)
    with pytest.raises(FileNotFoundError):
        BoxFile(tmp_path / "none")
