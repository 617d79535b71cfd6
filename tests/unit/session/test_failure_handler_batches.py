"""Non-finite batches of several threads at once: each has its own state, and none is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import NonFiniteError, Report, watch
from support.toys import Scale

INF = float("inf")


class Meets(nn.Module):
    """Makes an inf, waits until every other thread's batch has one too, and returns what is finite."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.bad = Scale(INF)
        self.barrier = threading.Barrier(parties, timeout=30)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bad(x)
        self.barrier.wait()
        return torch.nan_to_num(y)


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("action", ["raise", "call"])
@pytest.mark.parametrize("count", [2, 5])
def test_batches_that_fail_at_once_are_all_told(action: str, count: int) -> None:
    """With check="batch" each ends after all have had their fault: each call raises, or each report is handed over."""
    model = Meets(count)
    reports: list[Report] = []
    raised: list[NonFiniteError] = []

    def call() -> None:
        try:
            model(torch.ones(2))
        except NonFiniteError as error:
            raised.append(error)

    options: Any = {"on_nonfinite": reports.append if action == "call" else "raise", "forecast": False}
    with watch(model, check="batch", rerun=False, **options):
        threads = [threading.Thread(target=call) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    told = reports if action == "call" else [error.report for error in raised]
    batches = [report.finding.batch for report in told if report.finding is not None]
    assert sorted(batches) == list(range(count))


@pytest.mark.usefixtures("each_recorder")
def test_a_finite_batch_of_another_thread_hides_no_failure() -> None:
    """The finite batch ends while the non-finite one is under way, and is the last that the recorder reports."""
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Scale(INF)

        def forward(self, x: Tensor) -> Tensor:
            if x.numel() == 1:
                return x
            y = self.bad(x)
            inside.set()
            go_on.wait(30)
            return torch.nan_to_num(y)

    model = Waits()
    raised: list[NonFiniteError] = []

    def call() -> None:
        try:
            model(torch.ones(2))
        except NonFiniteError as error:
            raised.append(error)

    with watch(model, check="batch", rerun=False, forecast=False):
        thread = threading.Thread(target=call)
        thread.start()
        inside.wait(30)
        model(torch.ones(1))
        go_on.set()
        thread.join()
    assert len(raised) == 1


def test_ended_batches_are_known_for_a_while() -> None:
    """The latest numbers only. Nothing of a batch is kept but its report."""
    model = Scale()
    told: list[Report] = []
    with watch(model, on_nonfinite=told.append, rerun=False, forecast=False) as w:
        for _ in range(100):
            model(torch.ones(1) / 0)
        handler = w._failures
        assert [handler.knows(number) for number in (0, 35, 36, 99, 100)] == [False, False, True, True, False]
        assert not handler._under_way
        assert handler.failure is told[0]
