"""Ranks of a job: copies of one black box, with other ranks, processes and counts."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.blackbox.job import Job, read_job
from nanwatch.blackbox.story import BoxFile
from nanwatch.blackbox.story import read as read_black_box
from support.black_boxes import black_box, needs_box, other

pytestmark = needs_box


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
