"""Functions as frames: `nanwatch.watched`, on losses that no module computes."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.instrumentation import functions
from support.examined import comment_of
from support.recorders import RECORDERS, needs_native, watched
from support.toys import Does, fault_of


@pytest.fixture(autouse=True)
def _forget_functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Each later watch of this process would attach to these, and one that a test before has left would have them.
    monkeypatch.setattr(functions, "_running", [])
    yield
    functions._functions.clear()


def dpo(chosen: Tensor, rejected: Tensor) -> Tensor:
    margin = chosen.sum(-1) - rejected.sum(-1)
    return -torch.sigmoid(margin).log().mean()  # bad


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_functional_loss_is_named_with_its_line(place: str) -> None:
    seen = nanwatch.watched(dpo)
    model = Does(lambda x, y: seen(x, y) if place == "inside" else x)
    x, y = torch.full((2, 3), -100.0), torch.full((2, 3), 100.0)
    with nanwatch.watch(model):
        out = x if place == "inside" else model(x, y)
        finding = fault_of(model if place == "inside" else seen, out, y).finding
    assert (finding.module, finding.class_name, finding.origin) == ("dpo", "Function", "produced")
    assert comment_of(finding) == "bad"


def mean_of_kept(model: nn.Module, x: Tensor, kept: Tensor) -> Tensor:
    return (model(x).sum(-1) * kept).sum() / kept.sum()


def test_a_loss_that_calls_the_model_is_cured() -> None:
    """The model is an argument, and its weights are leaves of the backward by which a cure is judged."""
    model, loss = nn.Linear(3, 2), nanwatch.watched(mean_of_kept)
    with nanwatch.watch(model):
        finding = fault_of(loss, model, torch.full((2, 3), torch.nan), torch.ones(2)).finding
        assert (finding.module, finding.label, finding.origin) == ("mean_of_kept", "input[1]", "data")
        finding = fault_of(loss, model, torch.ones(2, 3), torch.zeros(2)).finding
    assert "+    return (model(x).sum(-1) * kept).sum() / kept.sum().clamp(min=1)" in finding.cures[0].patch


@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_function_outside_the_model_is_a_batch_of_its_own(recorder: str) -> None:
    squared = nanwatch.watched(lambda x: x * x, name="loss")
    model = nn.Identity()
    with watched(model, recorder) as watch:
        squared(model(torch.full((2,), 3.0)))
    frames = [(frame.batch, frame.name, frame.records[-1].abs_max) for frame in watch.frames]
    assert frames == [(0, "", 3.0), (1, "loss", 9.0)]


def test_the_gradients_of_a_loss() -> None:
    """A loss has gradients like a module, and its own call is run again to find the operation of its backward."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    root = nanwatch.watched(lambda x: (x * 1e-30).sqrt().sum(), name="root")
    with nanwatch.watch(model, gradients=True):
        root(model(torch.zeros(1, 2)) * 0).backward()
        report = fault_of(optimizer.step)
    assert ("root", "backward") in {(one.name, one.phase) for one in report.frames}
    assert (report.finding.module, report.finding.operation) == ("root", "SqrtBackward0")


@needs_native
@pytest.mark.compile
@pytest.mark.parametrize("begins_first", [True, False])
def test_compiled_code_records_a_watched_function(begins_first: bool) -> None:
    """The graph stays whole, before a watch, while it runs and after it; the values are those of eager code."""
    scaled = nanwatch.watched(lambda x: x * 3, name="scaled")
    model = Does(lambda x: scaled(x / 2))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    if not begins_first:
        assert compiled(torch.ones(2)).tolist() == [1.5, 1.5]
    watch = nanwatch.watch(model)
    assert compiled(torch.ones(2)).tolist() == [1.5, 1.5]
    assert [one.name for one in watch.frames] == ["scaled", ""]
    watch.stop()
    assert (compiled(torch.ones(2)).tolist(), watch.batch) == ([1.5, 1.5], 0)


def test_nothing_changes_without_a_watch() -> None:
    """The function is called with what was given, keeps its name, works as a method, and no watch stays alive."""

    class Trainer:
        @nanwatch.watched
        def loss(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            """Doc."""
            return x * scale

    assert (Trainer.loss.__name__, Trainer.loss.__doc__) == ("loss", "Doc.")
    trainer, x = Trainer(), torch.ones(1)
    assert trainer.loss(x, scale=2.0).item() == 2
    model = nn.Identity()
    watch: Any = nanwatch.watch(model)
    trainer.loss(x)
    assert [one.name for one in watch.frames] == ["loss"]
    alive = weakref.ref(watch), weakref.ref(model)
    del watch, model
    gc.collect()
    assert ([one() for one in alive], trainer.loss(x).item()) == ([None, None], 1)
