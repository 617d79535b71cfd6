"""A thread that calls the model during a re-run neither disturbs it nor is disturbed, and is watched."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import NonFiniteError, watch
from nanwatch.instrumentation import calls, execution_context
from nanwatch.instrumentation.slot import wrappers
from support.spy import Spy
from support.toys import fault_of, mlp


class Log(nn.Module):
    """The log, with noise; counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.log() + torch.rand(()) * 0


class Meeting(nn.Module):
    """In its re-run it lets another thread call it, and looks for a while whether that gets in."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.owner = threading.get_ident()
        self.runs = Spy()
        self.second_run = threading.Event()
        self.entered = threading.Event()
        self.came_in = Spy()
        self.waits = 0.3

    def forward(self, x: Tensor) -> Tensor:
        if threading.get_ident() != self.owner:
            self.entered.set()
            return self.log(x)
        self.runs.add()
        if len(self.runs.values) > 1:
            self.second_run.set()
            self.came_in.add(self.entered.wait(self.waits))
        return self.log(x)


def other(model: Meeting, callee: nn.Module, outputs: list[Any]) -> threading.Thread:
    """A thread that calls that module once the re-run is under way."""

    def work() -> None:
        assert model.second_run.wait(30)
        outputs.append(callee(torch.full((2,), 2.0)))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-runs in a child process keep no thread waiting."""
    monkeypatch.setenv("NANWATCH_RERUN", "in-process")


@pytest.mark.parametrize("part", [False, True], ids=["the model", "the guilty module"])
def test_another_thread_waits_and_is_watched_then(part: bool) -> None:
    """Its call is no part of the re-run; afterwards it is a batch of its own, with all that it wrote."""
    model = Meeting()
    outputs: list[Any] = []
    with watch(model) as w:
        thread = other(model, model.log if part else model, outputs)
        finding = fault_of(model, torch.zeros(2)).finding
        thread.join(60)
        assert not thread.is_alive()
        frames = w.frames
    assert not any(model.came_in.values)
    assert torch.equal(outputs[0], torch.full((2,), 2.0).log())
    assert model.log.count == 2  # the failed batch's and the other thread's; the re-runs' are taken back
    assert (finding.module, finding.operation, finding.transient) == ("log", "aten.log.default", False)
    assert [frame.name for frame in frames if frame.batch == 1] == (["log"] if part else ["log", ""])
    assert all(not wrappers(module) for module in model.modules())


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that the re-run waits for comes through after one wait for all its calls: nothing hangs."""
    monkeypatch.setattr(execution_context, "PATIENCE", 0.1)
    model = Meeting()
    model.waits = 60.0
    outputs: list[Any] = []
    with watch(model):
        thread = other(model, model, outputs)
        with pytest.raises(NonFiniteError):
            model(torch.zeros(2))
        thread.join(60)
        assert not thread.is_alive()
    assert any(model.came_in.values)
    assert torch.equal(outputs[0], torch.full((2,), 2.0).log())


class Ends(nn.Module):
    """In its re-run it does what it was given, here or in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Spy()
        self.do: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.runs.add()
        if len(self.runs.values) == 2:
            self.do()
        return x


def in_a_thread(do: Callable[[], None]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in a hook", "in another thread"])
@pytest.mark.parametrize("action", ["stop", "pause"])
def test_what_ends_a_watch_during_a_second_run_holds(action: str, elsewhere: bool) -> None:
    """After stop() or pause() nothing is recorded and nothing raises, also once the re-run is over."""
    ends = Ends()
    model = nn.Sequential(ends, Log())
    w = watch(model)
    end = getattr(w, action)
    ends.do = (lambda: in_a_thread(end)) if elsewhere else end
    with pytest.raises(NonFiniteError):
        model(torch.zeros(2))
    assert len(ends.runs.values) >= 2
    frames = w.counters["frames"]
    model(torch.zeros(2))
    assert w.counters["frames"] == frames
    assert any(wrappers(module) for module in model.modules()) == (action == "pause")
    if action == "pause":
        w.resume()
        with pytest.raises(NonFiniteError):
            model(torch.zeros(2))
        w.stop()


def test_a_rehearsal_is_no_batch() -> None:
    """Its call is unrecorded, and its value comes back; one of what has no module is made all the same."""
    model = mlp()
    rehearse = calls._unrecorded(lambda stage, x: model(x))
    with watch(model) as w:
        for stage in (SimpleNamespace(submod=model), SimpleNamespace()):
            assert rehearse(stage, torch.ones(2, 3)).isfinite().all()
        frames = w.frames
    assert {frame.batch for frame in frames} == {0}  # of the second alone
