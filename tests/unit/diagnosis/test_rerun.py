"""Re-runs as a watch makes them: when, when not, and what it leaves behind."""

from __future__ import annotations

import itertools
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch import NonFiniteError, Report
from nanwatch.diagnosis import batch_snapshot
from nanwatch.instrumentation.execution_context import PATIENCE
from support.toys import Does, fault_of
from support.watching import watch


class Log(nn.Module):
    """The log of what it is given; counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.log()


@pytest.mark.parametrize("how", ["record", "warn", "call"])
def test_which_actions_run_a_batch_again_unasked(how: Any) -> None:
    """A function gets the whole report. The others run a batch again with rerun=True alone, and say so."""
    with pytest.warns(RuntimeWarning) if how == "warn" else threading.Lock():
        for asked in (None, True, False):
            model, seen = Log(), []
            with watch(model, on_nonfinite=seen.append if how == "call" else how, rerun=asked) as w:
                model(torch.zeros(2))
            finding = w.report().finding
            assert finding is not None
            is_run = asked or (asked is None and how == "call")
            assert (finding.operation is not None, model.calls) == (is_run, 1)
            assert seen == ([w.report()] if how == "call" else [])
            assert ("rerun=True (--rerun)" in w.report().to_text()) == (asked is None and not is_run)


@pytest.mark.parametrize("check", ["module", "batch"])
def test_a_fault_in_a_recomputation_is_raised_where_it_is_seen(check: Any) -> None:
    """The end of a recomputed forward is told to nobody: waiting for it would lose the error."""
    factors = itertools.chain([1.0], itertools.repeat(math.inf))
    # The backward needs what the second of them saved.
    model = nn.Sequential(Does(lambda x: x * next(factors)), nn.Tanh())
    x = torch.ones(2, requires_grad=True)
    with watch(model, act_at=check):
        y = checkpoint(model, x, use_reentrant=False)
        with pytest.raises(NonFiniteError):
            (y * y).sum().backward()


def test_everything_is_written_and_named_in_the_error(tmp_path: Path) -> None:
    """The folder holds text, JSON, page, capsule and the first patch, and the JSON is the error's report."""
    pytest.importorskip("jinja2")
    with watch(model := Log(), output_dir=tmp_path), pytest.raises(NonFiniteError) as error:
        model(torch.zeros(2))
    folder = tmp_path / "batch-0"
    names = {"capsule", "cure.patch", "report.html", "report.json", "report.txt"}
    assert {path.name for path in folder.iterdir()} == names
    finding = error.value.report.finding
    assert (folder / "cure.patch").read_text() == finding.cures[0].patch
    assert Report.from_json((folder / "report.json").read_text()) == error.value.report
    for path in folder.iterdir():
        assert str(path) in str(error.value)


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("wraps", [False, True], ids=["kept", "wrapped"])
def test_an_error_met_inside_a_forward_is_complete_outside(wraps: bool) -> None:
    """Code inside the forward meets the very error that leaves it, whole: what it kept, annotated or wrapped."""
    met: list[NonFiniteError] = []
    inside: list[Report] = []

    def meets(log: nn.Module, x: Tensor) -> Tensor:
        try:
            return log(x)
        except NonFiniteError as error:
            met.append(error)
            error.mine = "a note"  # type: ignore[attr-defined]
            inside.append(error.report)
            if wraps:
                raise LookupError("mine") from error
            raise

    model = Does(meets, Log())
    with watch(model), pytest.raises(LookupError if wraps else NonFiniteError) as left:
        model(torch.zeros(2))
    error = left.value.__cause__ if wraps else left.value
    assert error is met[0]
    assert inside[0].finding.operation is None  # no re-run inside the forward
    assert (vars(error)["mine"], met[0].report.finding.operation) == ("a note", "aten.log.default")
    copied = pickle.loads(pickle.dumps(met[0]))
    assert copied.report == met[0].report


def test_a_thread_inside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no re-run in this process while it is inside, and a remark says so."""
    monkeypatch.setenv("NANWATCH_RERUN", "in-process")
    is_inside, may_leave = threading.Event(), threading.Event()

    def waits(x: Tensor) -> Tensor:
        if len(x) == 1:
            is_inside.set()
            assert may_leave.wait(60)
        return x.log()

    with watch(model := Does(waits)):
        thread = threading.Thread(target=lambda: model(torch.ones(1)))
        thread.start()
        assert is_inside.wait(60)
        finding = fault_of(model, torch.zeros(2)).finding
        may_leave.set()
        thread.join(60)
    assert finding.operation is None
    assert any("another thread was inside the model" in remark for remark in finding.remarks)


@pytest.mark.parametrize("bad", [(3,), (0, 5)])
def test_the_samples_that_carry_the_failure_are_named(bad: tuple[int, ...]) -> None:
    """Without them the batch is finite, and alone they are not."""
    x = torch.ones(8, 2)
    x[list(bad), 1] = 0.0
    with watch(model := Does(lambda x, scale: (x * scale).log())):
        finding = fault_of(model, x, torch.tensor(2.0)).finding
    assert finding.samples == bad


def test_a_model_that_waits_for_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its re-run in this process ends by the clock, and the thread comes through at once."""
    monkeypatch.setenv("NANWATCH_RERUN", "in-process")
    monkeypatch.setattr(batch_snapshot, "LEAST_SECONDS", 0.5)
    waits: list[tuple[float | None, bool]] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        waits.append((timeout, wait(event, timeout)))
        return waits[-1][1]

    monkeypatch.setattr(threading.Event, "wait", noted)

    def in_pool(part: nn.Module, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(part, x).result().log()  # type: ignore[no-any-return]

    with watch(model := Does(in_pool, nn.Identity())):
        finding = fault_of(model, torch.zeros(2)).finding
    assert any("was ended" in remark for remark in finding.remarks)
    assert {has_ended for timeout, has_ended in waits if timeout == PATIENCE} == {True}
