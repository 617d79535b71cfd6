"""Re-runs in a forked child and in the process of the program: what stays, their clock, and what an interrupt means."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanwatch import Finding, NonFiniteError, watch
from nanwatch.diagnosis.isolation import ChildEndedError, RerunEndedError, can_fork, run_in_child, send
from support.examined import exponential
from support.processes import until
from support.spy import Spy
from support.toys import Does

IS_NO_LINUX = sys.platform != "linux"
PLACES = ["in-process", *(["child"] if sys.platform == "linux" else [])]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the re-run is made, with a clock of half a second."""
    monkeypatch.setattr("nanwatch.diagnosis.batch_snapshot.LEAST_SECONDS", 0.5)
    monkeypatch.setenv("NANWATCH_RERUN", request.param)
    return request.param


def finding_of(model: nn.Module, expected: type[BaseException] = NonFiniteError) -> Finding:
    """The finding of the error that this model raises, or that is the cause of what it raises."""
    with watch(model), pytest.raises(expected) as raised:
        model(torch.ones(2))
    error: Any = raised.value if isinstance(raised.value, NonFiniteError) else raised.value.__cause__
    return error.report.finding


def second_time(does: Callable[[], Any]) -> nn.Module:
    """A model that overflows, whose forward does this each time but the first."""
    runs = Spy()

    def forward(part: nn.Module, x: Tensor) -> Tensor:
        runs.add()
        if len(runs.values) > 1:
            does()
        return part(x)

    return Does(forward, Does(exponential))


@pytest.mark.skipif(IS_NO_LINUX, reason="no child process")
def test_a_child_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    """As where the system kills that for its memory."""
    mark = tmp_path / "child"
    if (parent := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            list(run_in_child(lambda: (mark.symlink_to(str(os.getpid())), time.sleep(60)), 60.0))
        os._exit(1)
    until(mark.is_symlink)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(lambda: not is_running(int(os.readlink(mark))))


def test_a_lock_that_does_not_come_ends_a_run_by_its_clock(place: str) -> None:
    """In the main thread. The finding has the module, and says why it has no operation."""
    lock, handler = threading.Lock(), signal.getsignal(signal.SIGURG)
    lock.acquire()
    finding = finding_of(second_time(lock.acquire))
    assert (finding.module, finding.operation, finding.transient) == ("parts.0", None, None)
    assert any("it took longer than" in x and "test_isolation.py" in x for x in finding.remarks)
    assert signal.getsignal(signal.SIGURG) is handler


def test_a_clock_ends_a_loop_in_another_thread(place: str) -> None:
    """No signal reaches it."""

    def loops() -> None:
        while True:
            sum(range(1000))

    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(finding_of(second_time(loops))))
    thread.start()
    thread.join(30)
    assert [x.operation for x in found] == [None]
    assert any("it took longer than" in x for x in found[0].remarks)


def test_a_clock_leaves_the_cures_that_were_found(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later trial does not end."""
    ended = mock.Mock(side_effect=RerunEndedError("it took longer"))
    monkeypatch.setattr("nanwatch.diagnosis.rerun.try_formats", ended)
    finding = finding_of(Does(lambda x: torch.log(x - 1)))
    assert [cure.works for cure in finding.cures] == [True]
    assert any("the re-run of the batch ended: it took longer" in x for x in finding.remarks)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_the_child_s_or_means_what_it_means(place: str, kind: type[BaseException]) -> None:
    """In the process it is raised once the finding is complete and the random state is put back."""

    def interrupts() -> None:
        torch.rand(3)
        raise kind

    torch.manual_seed(0)
    finding = finding_of(second_time(interrupts), NonFiniteError if place == "child" else kind)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(0)))
    assert (finding.module, finding.operation) == ("parts.0", None)
    assert any(kind.__name__ in x for x in finding.remarks)


@pytest.mark.skipif(IS_NO_LINUX, reason="children are made on Linux")
def test_the_document_comes_back_and_nothing_else(tmp_path: Path) -> None:
    """Of memory, files, random numbers and processes nothing that the child did is left."""
    values, state, file = [1], random.getstate(), tmp_path / "log"
    opened, mapped = file.open("w"), np.memmap(tmp_path / "mapped", np.uint8, "w+", shape=5000)
    lock, arrays = multiprocessing.Lock(), [mapped, torch.zeros(5000).share_memory_().numpy()]

    def work() -> Any:
        values.append(2)
        for array in arrays:
            array[[0, -1]] += 2
        lock.acquire()
        for written in opened, file.open("a"):
            written.write("in the child")
            written.flush()
        torch.ones(1000) @ torch.ones(1000)
        ended, left = [multiprocessing.Process(target=time.sleep, args=(60,)) for _ in range(2)]
        ended.start(), left.start(), ended.terminate(), ended.join()
        written = [*values, *(int(x[-1]) for x in arrays)]
        return {"values": written, "drawn": random.random(), "processes": [os.getpid(), left.pid]}

    handler = signal.signal(signal.SIGTERM, lambda *_: None)  # no process of the child has it
    (document,) = run_in_child(work, 30.0)
    signal.signal(signal.SIGTERM, handler)
    assert (document["values"], [int(x[0]) for x in arrays]) == ([1, 2, 2, 2], [0, 0])
    opened.close()
    assert (values, random.getstate(), file.read_text(), lock.acquire(timeout=0)) == ([1], state, "", True)
    assert document["drawn"] == random.random()  # it has the program's generator, not one seeded anew
    until(lambda: not any(map(is_running, document["processes"])))


def is_running(process: int) -> bool:
    state = Path("/proc", str(process), "stat")
    return state.exists() and ") Z " not in state.read_text()


@pytest.mark.skipif(IS_NO_LINUX, reason="children are made on Linux")
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (partial({}.pop, "mine"), "it raised KeyError: 'mine'"),
        (partial(time.sleep, 60), "it took longer than 1 s, and was ended"),
        (partial(os._exit, 7), "its process ended with status 7"),
    ],
)
def test_a_child_that_does_not_end_well_says_why(end: Callable[[], Any], words: str) -> None:
    """After what it sent; its clock begins anew with each. It is waited for."""

    def work() -> Any:
        for number in range(3):
            time.sleep(0.4)
            send([number, os.getpid()])
        return end()

    documents = list[Any]()
    with pytest.raises(ChildEndedError, match=words):
        documents.extend(run_in_child(work, 1.0))
    assert [number for number, _ in documents] == [0, 1, 2]
    assert not Path("/proc", str(documents[0][1])).exists()


@pytest.mark.skipif(IS_NO_LINUX, reason="children are made on Linux")
def test_a_child_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system and by CUDA; `place` has the environment."""
    assert can_fork()
    for owner, name, value in (torch.cuda, "device_count", lambda: 1), (sys, "platform", "darwin"):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not can_fork()
