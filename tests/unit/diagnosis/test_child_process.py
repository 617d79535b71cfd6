"""Work in a forked child: its result, its clock, how it ends, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanwatch.diagnosis.child_process import ChildEndedError, run_in_child, send, why_no_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are made on Linux")


def test_the_document_comes_back_and_nothing_else(tmp_path: Path) -> None:
    """Of memory, open files and random numbers nothing that the child did is left."""
    values, state, file = [1], random.getstate(), tmp_path / "log"
    opened = file.open("w")

    def work() -> Any:
        values.append(2)
        opened.write("in the child")
        opened.flush()
        torch.ones(1000) @ torch.ones(1000)
        return {"values": values, "drawn": random.random(), "process": os.getpid()}

    document = run_in_child(work, 30.0)
    assert document["values"] == [1, 2]
    assert document["process"] != os.getpid()
    opened.close()
    assert (values, random.getstate(), file.read_text()) == ([1], state, "")
    assert document["drawn"] == random.random()  # it has the program's generator, not one seeded anew


def raises() -> Any:
    raise KeyError("mine")


def sleeps() -> Any:
    time.sleep(60)


def leaves() -> Any:
    os._exit(7)


def children() -> set[str]:
    """The processes whose parent this one is, also those that have ended and are not waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if path.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(path.parent.name)
    return found


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (raises, "it raised KeyError: 'mine'"),
        (sleeps, "it took longer than 1 s, and was ended"),
        (leaves, "its process ended with status 7"),
    ],
)
def test_a_child_that_does_not_end_well_says_why(end: Callable[[], Any], words: str) -> None:
    """With the latest that it sent; its clock begins anew with each."""

    def work() -> Any:
        for number in range(3):
            time.sleep(0.4)
            send({"known": number})
        return end()

    others = children()
    with pytest.raises(ChildEndedError, match=words) as caught:
        run_in_child(work, 1.0)
    assert caught.value.latest == {"known": 2}
    assert children() <= others


def test_a_child_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment, by the system, and by CUDA."""
    monkeypatch.setenv("NANWATCH_RERUN", "in-process")
    assert why_no_child() == "NANWATCH_RERUN=in-process"
    monkeypatch.delenv("NANWATCH_RERUN")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert why_no_child() == "CUDA does not survive a fork"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_no_child() == "darwin has no safe fork"
