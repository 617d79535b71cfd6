"""Re-runs in the process of the program, and in a child: their clock, and what an interrupt means."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import Finding, NonFiniteError, watch
from support.examined import Does, exponential
from support.spy import Spy

PLACES = ["in-process", *(["child"] if sys.platform == "linux" else [])]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the re-run is made, with a clock of half a second."""
    monkeypatch.setattr("nanwatch.session.rerun_policy.LEAST_SECONDS", 0.5)
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


def test_a_lock_that_does_not_come_ends_a_run_by_its_clock(place: str) -> None:
    """In the main thread. The finding has the module, and says why it has no operation."""
    lock, handler = threading.Lock(), signal.getsignal(signal.SIGURG)
    lock.acquire()
    began = time.monotonic()
    finding = finding_of(second_time(lock.acquire))
    assert time.monotonic() - began < 20
    assert (finding.module, finding.operation, finding.transient) == ("parts.0", None, None)
    assert any("it took longer than" in x and "test_in_process.py" in x for x in finding.remarks)
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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_the_child_s_or_means_what_it_means(place: str, kind: type[BaseException]) -> None:
    """In the process it is raised once the finding is complete and the random state is put back."""

    def interrupts() -> None:
        torch.rand(3)
        raise kind

    torch.manual_seed(0)
    finding = finding_of(second_time(interrupts), NonFiniteError if place == "child" else kind)
    drawn = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(2))
    assert (finding.module, finding.operation) == ("parts.0", None)
    assert any(kind.__name__ in x for x in finding.remarks)
