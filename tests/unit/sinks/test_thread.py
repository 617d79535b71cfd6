"""A sink in a thread of its own: it delays neither a step nor the end of the process, and drops what it cannot take."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.sinks import thread as sink_thread
from nanwatch.sinks.thread import SinkThread
from nanwatch.util.visible import counts
from support.processes import environment, forked
from support.toys import Scale


class Held(nanwatch.Sink):
    """Takes nothing until it is let go."""

    in_thread = True

    def __init__(self) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.told: list[tuple[str, str]] = []

    def on_failure(self, report: nanwatch.Report) -> None:
        self.entered.set()
        self.go.wait(60)
        self.told.append((threading.current_thread().name, f"batch {report.batch}"))

    def on_close(self) -> None:
        self.told.append((threading.current_thread().name, "closed"))


@pytest.fixture
def held() -> Iterator[Held]:
    sink = Held()
    yield sink
    sink.go.set()


def settled() -> None:
    """Wait until no sink has anything to do."""
    until = time.monotonic() + 60
    while sink_thread._threads and time.monotonic() < until:
        time.sleep(0.01)
    assert not sink_thread._threads


def test_a_blocked_sink_delays_nothing_and_gets_its_events_later(held: Held) -> None:
    """Neither the batches, nor the error, nor the end of the watch."""
    model = nn.Sequential(Scale(float("inf")))
    with nanwatch.watch(model, sinks=held, rerun=False):
        for _ in range(2):
            with pytest.raises(nanwatch.NonFiniteError):
                model(torch.ones(2))
        assert held.entered.wait(60)
        assert held.told == []
    held.go.set()
    settled()
    assert [words for _, words in held.told] == ["batch 0", "batch 1", "closed"]
    assert {thread for thread, _ in held.told} == {"nanwatch the sink Held"}


def test_what_has_no_room_is_dropped_counted_and_told_once(
    held: Held, recwarn: pytest.WarningsRecorder
) -> None:
    """The end is still told."""
    told: list[Any] = []

    def deliver(event: str, args: tuple[Any, ...]) -> None:
        held.entered.set()
        held.go.wait(60)
        told.append((event, *args))

    thread = SinkThread("the sink slow", deliver)
    before = counts["the sink slow dropped an event"]
    thread.put("on_failure", (0,))
    assert held.entered.wait(60)
    for number in range(1, 100):
        thread.put("on_batch", (number,))
        thread.put("on_failure", (number,))
    assert [str(one.message) for one in recwarn] == [
        "the sink slow is too slow: events are dropped; the run goes on"
    ]
    thread.put("on_close", ())
    thread.close()
    held.go.set()
    settled()
    assert sum(event == "on_batch" for event, *_ in told) == 4
    assert sum(event == "on_failure" for event, *_ in told) == 60
    assert counts["the sink slow dropped an event"] - before == 99 + 100 - 64
    assert told[-1] == ("on_close",)


def test_one_that_raises_is_called_no_more(recwarn: pytest.WarningsRecorder) -> None:
    """Which one warning says, as of a sink in the thread of the run."""
    called: list[int | None] = []

    class Broken(nanwatch.Sink):
        in_thread = True

        def on_failure(self, report: nanwatch.Report) -> None:
            called.append(report.batch)
            raise OSError("no")

    model = nn.Sequential(Scale(float("inf")))
    with nanwatch.watch(model, sinks=Broken(), rerun=False, on_nonfinite="record"):
        model(torch.ones(2))
        settled()
        model[0].factor = 1.0
        model(torch.ones(2))
        model[0].factor = float("inf")
        model(torch.ones(2))
    (warning,) = recwarn
    assert str(warning.message).startswith(
        "nanwatch logs no more to the sink Broken, which raised OSError: no"
    )
    assert called == [0]
    assert not sink_thread._threads


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_a_forked_child_waits_for_no_thread() -> None:
    """Though the lock was taken in the moment of the fork."""
    thread = SinkThread("the sink", lambda event, args: None)
    with thread._changed:
        child = os.fork()
        if child == 0:
            after = threading.Thread(target=lambda: (thread.close(), thread.finish(0.0)), daemon=True)
            after.start()
            after.join(30)
            os._exit(after.is_alive())
    assert os.waitpid(child, 0)[1] == 0


BLOCKED = """
import sys, threading, time
import nanwatch, torch
from nanwatch.sinks import thread as sink_thread
sink_thread._SECONDS = float(sys.argv[1])
class Blocked(nanwatch.Sink):
    in_thread = True
    def on_failure(self, report):
        threading.Event().wait(float(sys.argv[2]))
        print("told", flush=True)
watch = nanwatch.watch(model := torch.nn.LayerNorm(2, eps=0.0), sinks=Blocked())
model(torch.zeros(1, 2))
"""


@pytest.mark.parametrize(
    ("seconds", "blocked", "is_told"), [(0.2, 600.0, False), (60.0, 0.2, True)], ids=["hangs", "slow"]
)
def test_the_end_of_a_process_waits_a_little(seconds: float, blocked: float, is_told: bool) -> None:
    """The exception that ends it is printed as ever; a sink that hangs is left."""
    done = forked("-c", BLOCKED, str(seconds), str(blocked), env=environment(), timeout=60)
    assert done.returncode == 1
    assert "NonFiniteError: nan first seen" in done.stderr
    assert (done.stdout == "told\n") is is_told
    assert ("the sink Blocked did not take the last 1 events" in done.stderr) is not is_told
