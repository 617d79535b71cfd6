"""The reader has what was written, also while it is written, and refuses what was damaged."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import watch
from nanwatch.blackbox.box_file import BoxFile
from nanwatch.blackbox.story import read_black_box
from support.black_boxes import black_box, needs_box, until

pytestmark = needs_box


class Nested(nn.Module):
    """A module inside a module, and so on."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


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
    with black_box(tmp_path) as box, watch(model):
        for batch[0] in range(5):
            model(torch.ones(3, 4))
        assert ended_calls(BoxFile(box.path)) == log


def test_the_latest_calls_outlive_the_ring(tmp_path: Path) -> None:
    """The latest 20,000 at least, without a gap."""
    model = nn.Identity()
    count = (1 << 15) + 100
    x = torch.ones(1)
    with black_box(tmp_path) as box, watch(model):
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

    with black_box(tmp_path) as box, watch(model):
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


def test_more_threads_than_places_leave_some_out(tmp_path: Path) -> None:
    """The file has 64 of 70 threads, and all of the next 64."""
    meeting, release = threading.Barrier(71), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            meeting.wait()
            release.wait()
            return x

    def run() -> list[threading.Thread]:
        threads = [threading.Thread(target=model, args=(torch.ones(1),)) for _ in range(70)]
        for thread in threads:
            thread.start()
        meeting.wait()
        return threads

    model = Waits()
    with black_box(tmp_path) as box, watch(model):
        for _ in range(2):
            release.clear()
            threads = run()
            assert len(read_black_box(box.path).threads) == 64
            release.set()
            for thread in threads:
                thread.join()
        assert read_black_box(box.path).threads == ()


def test_what_is_deeper_than_the_stack_is_left_out(tmp_path: Path) -> None:
    """The outermost 120 calls are under way, and the names of others are not taken for theirs."""
    model = Nested(150)
    seen = []
    module = model
    while isinstance(module.inner, Nested):
        module = module.inner
    with black_box(tmp_path) as box, watch(model):
        module.inner.register_forward_hook(lambda *_: seen.append(read_black_box(box.path)))
        model(torch.ones(1))
        model(torch.ones(1))
    assert [len(call.module.split(".")) for call in seen[1].threads[0].calls] == [1, *range(1, 120)]
    assert read_black_box(box.path).threads == ()
    assert read_black_box(box.path).num_calls == 240


def test_names_that_have_no_room_are_told_by_a_number(tmp_path: Path) -> None:
    """Texts beyond 2 MiB leave the calls of the others as they are."""
    model = nn.Sequential()
    for number in range(40):
        model.add_module(f"{number}-".ljust(60_000, "x"), nn.Identity())
    with black_box(tmp_path) as box, watch(model):
        model(torch.ones(1))
        report = read_black_box(box.path)
    assert report.num_calls == 41
    assert [one.module.partition("-")[0] for one in report.calls[:34]] == list(map(str, range(34)))
    assert {one.class_name for one in report.calls[36:40]} == {"?"}


def test_damaged_files_give_a_report_or_an_error(tmp_path: Path) -> None:
    """Cut at some places, and with a byte of chance at others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with black_box(tmp_path) as box, watch(model):
        model(torch.ones(2, 4))
        whole = box.path.read_bytes()
    chance = random.Random(0)
    copy = tmp_path / "copy.blackbox"
    for place in [chance.randrange(len(whole)) for _ in range(150)]:
        damaged = bytearray(whole)
        damaged[place] ^= chance.randrange(1, 256)
        copy.write_bytes(whole[:place] if place % 3 == 0 else damaged)
        with contextlib.suppress(ValueError):
            str(read_black_box(copy))


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Each with what it is."""
    file, pipe = tmp_path / "text", tmp_path / "pipe"
    file.write_text("a text\n")
    with pytest.raises(ValueError, match="is no black box of this version"):
        BoxFile(file)
    os.mkfifo(pipe)
    with pytest.raises((ValueError, OSError)):
        BoxFile(pipe)
    with pytest.raises(FileNotFoundError):
        BoxFile(tmp_path / "none")
