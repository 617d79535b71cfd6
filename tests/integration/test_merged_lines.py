"""Where watches meet threads, recomputations and exceptions of the user's: one test for each fault a review found."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanwatch
from nanwatch import watch

pytestmark = pytest.mark.usefixtures("each_recorder")


class Masked(nn.Module):
    """Softmax over scores of which some are masked; `refuses` is raised by a hook on the softmax."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.softmax = kind(-1)  # type: ignore[call-arg]
        self.refuses: Exception | None = None
        self.softmax.register_forward_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        if self.refuses is not None:
            raise self.refuses

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(x.masked_fill(torch.eye(3, dtype=torch.bool), -torch.inf))


def test_masked_scores_are_no_finding_of_an_exception_that_left_them() -> None:
    """The note of a user's exception judges a softmax as a frame does."""
    model = Masked(nn.Softmax)
    model.refuses = ValueError("mine")
    reports: list[nanwatch.Report] = []
    with watch(model, on_nonfinite=reports.append):
        with pytest.raises(ValueError, match="mine") as raised:
            model(torch.ones(3, 3))
        assert not getattr(raised.value, "__notes__", [])
    assert reports == []


def test_masked_scores_without_their_inputs() -> None:
    """With inputs=False log-softmax's own result tells: -inf with a finite score in each row is no failure."""
    model = Masked(nn.LogSoftmax)
    with watch(model, inputs=False):
        model(torch.ones(3, 3))
        with pytest.raises(nanwatch.NonFiniteError):
            model(torch.full((3, 3), -torch.inf))


def test_a_tensor_that_was_excused_is_judged_anew_once_written() -> None:
    """The same memory with as many -inf in other places is no mask."""

    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax, self.made = nn.Softmax(-1), nn.Identity()

        def forward(self, x: Tensor, written: bool) -> Tensor:
            if not written:
                return self.softmax(x)
            x.copy_(torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]]))
            return self.made(x).exp()

    model, x = Reuses(), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    with watch(model, on_nonfinite="record") as w:
        model(x, False)
        assert w.report().finding is None
        model(x, True)
        finding = w.report().finding
    assert finding is not None
    assert finding.module == "made"


def test_an_exception_raised_once_more_tells_of_this_batch_alone() -> None:
    """Its traceback still holds the calls that it left the first time, with their arguments."""

    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.error = nn.Identity(), ValueError("no data")

        def forward(self, x: Tensor, inside: bool) -> Tensor:
            if inside:
                self.part.register_forward_hook(self._raise)
                return self.part(x)
            raise self.error

        def _raise(self, *_: Any) -> None:
            raise self.error

    model = Refuses()
    with pytest.raises(ValueError, match="no data"):
        model(torch.full((2,), float("nan")), True)
    reports: list[nanwatch.Report] = []
    with watch(model, on_nonfinite=reports.append), pytest.raises(ValueError, match="no data") as raised:
        model(torch.ones(2), False)
    assert reports == []
    assert not getattr(raised.value, "__notes__", [])


def test_a_recomputation_takes_nothing_from_another_threads_batch() -> None:
    """A recomputation has the number of the latest batch, here one under way, whose own failure is still reported."""
    inside, goes_on = threading.Event(), threading.Event()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.own = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, waits: bool = False) -> Tensor:
            if not waits:
                return checkpoint(self.part, x, use_reentrant=False)
            inside.set()
            assert goes_on.wait(30)
            return self.own(x * 3e38) * 3e38

    model, reports = Model(), []
    torch.nn.init.constant_(model.part.weight, 1.0)
    with watch(model, on_nonfinite=reports.append):
        loss = model(torch.full((1, 4), 3e38)).sum()
        assert [report.batch for report in reports] == [0]
        other = threading.Thread(target=lambda: model(torch.full((1, 4), 1e3), waits=True))
        other.start()
        assert inside.wait(30)
        loss.backward()
        before = len(reports)
        goes_on.set()
        other.join()
    assert [report.batch for report in reports[before:]] == [1]


def test_a_thread_in_a_batch_that_is_not_recorded_is_inside_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every=2 a failed batch is not run again over the buffers that the other thread's batch is writing."""
    monkeypatch.setenv("NANWATCH_RERUN", "in-process")
    inside, goes_on = threading.Event(), threading.Event()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(()))
            self.part = nn.Identity()

        def forward(self, x: Tensor, waits: bool = False) -> Tensor:
            if waits:
                inside.set()
                assert goes_on.wait(30)
                self.seen += 1
            return self.part(x * 4)

    model = Model()
    with watch(model, every=2):
        model(torch.ones(2))
        other = threading.Thread(target=lambda: model(torch.ones(2), waits=True))
        other.start()
        assert inside.wait(30)
        with pytest.raises(nanwatch.NonFiniteError) as raised:
            model(torch.full((2,), 3e38))
        goes_on.set()
        other.join()
    finding = raised.value.report.finding
    assert finding is not None
    assert any("another thread was inside the model" in remark for remark in finding.remarks)
    assert model.seen == 1


@pytest.mark.parametrize("action", ["raise", "warn"])
def test_a_failure_that_is_over_keeps_no_local_of_the_forward(action: Any) -> None:
    """Neither the error nor a warning holds frames in a cycle: tensors go without a garbage collection."""
    made: list[weakref.ref[Tensor]] = []

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            local = torch.ones(1000)
            made.append(weakref.ref(local))
            return self.part(x * local[0])

    model = Local()
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with (
                watch(model, on_nonfinite=action, rerun=False),
                contextlib.suppress(nanwatch.NonFiniteError),
            ):
                model(torch.full((2,), torch.inf))
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


def test_a_faulty_frame_that_others_pushed_out_is_found() -> None:
    """Frames of another thread fill the ring before the report is made; the finding is of the failed call."""
    model = nn.Sequential(nn.Identity())
    other = threading.Thread(target=lambda: [model(torch.ones(2)) for _ in range(8)])

    with watch(model, max_frames=4, rerun=False) as w:
        plain = w._reports._frames

        def frames(more: Any) -> Any:
            if not other.ident:
                other.start()
                other.join()
            return plain(more)

        w._reports._frames = frames  # type: ignore[method-assign]
        with pytest.raises(nanwatch.NonFiniteError) as raised:
            model(torch.full((2,), torch.inf))
    finding = raised.value.report.finding
    assert finding is not None
    assert (finding.module, finding.label, finding.batch) == ("0", "input[0]", 0)
    assert any(frame.fault is not None for frame in raised.value.report.frames)
