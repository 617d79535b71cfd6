"""A failure: whom it blames, its note on somebody else's exception, and its warnings: few, at the user's line."""

import contextlib
import gc
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch import NonFiniteError, Report, Sink
from support.gradient_models import Sick
from support.toys import Does, Scale, fault_of
from support.watching import watch

pytestmark = pytest.mark.usefixtures("each_recorder")

INF = float("inf")


class Parts(nn.Module):
    """Give its second layer a nan that its own code makes, in a way that leaves no call of it around that layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_module("removed", None)

    def bad(self, x: Tensor) -> Tensor:
        return (self.first(x) - 9).log()


class InThread(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(self.second, self.bad(x)).result()


class Streams(Parts):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return map(self.second, [self.bad(x)])


class NeverCalled(Parts):
    def fit(self, x: Tensor) -> Tensor:
        return self.second(x)


class CalledInThreads(NeverCalled):
    """Another thread is inside the first layer while the second is called."""

    def fit(self, x: Tensor) -> Tensor:
        entered, ends = threading.Event(), threading.Event()

        def wait(*_: object) -> None:
            entered.set()
            ends.wait(9)

        self.first.register_forward_hook(wait)
        with ThreadPoolExecutor(1) as executor:
            executor.submit(self.first, torch.ones(2))
            entered.wait(9)
            try:
                return self.second(x)
            finally:
                ends.set()


@pytest.mark.parametrize(
    ("kind", "run", "origin"),
    [
        (InThread, lambda model: model(torch.ones(2)), "received"),
        (Streams, lambda model: list(model(torch.ones(2))), "received"),
        (NeverCalled, lambda model: model.fit(torch.tensor([INF, 1.0])), "data"),
        (CalledInThreads, lambda model: model.fit(torch.tensor([INF, 1.0])), "data"),
    ],
)
def test_the_data_is_blamed_only_where_the_batch_came_with_it(kind, run, origin):
    """A layer that the model calls from a thread got no data from a loader."""
    model = kind().requires_grad_(False)  # else the graph says that the model made it
    watch(model, rerun=False)
    finding = fault_of(run, model).finding
    assert (finding.module, finding.origin, finding.source_module) == ("second", origin, None)


def test_data_in_an_object_is_data() -> None:
    """The object is entered once a value is met that it may have held. A bad cache that has grown is data, too."""

    class Unpacks(nn.Sequential):
        def forward(self, batch: Any) -> Tensor:
            if isinstance(batch, dict):
                batch["x"] = batch["x"].log_() if batch["x"].min() < 0 else batch["x"]
                batch["x"] = torch.stack([batch["x"], torch.ones(2)])
            return super().forward(batch["x"] if isinstance(batch, dict) else batch.x)

    model = Unpacks(nn.Linear(2, 2))
    with watch(model):
        for kind in SimpleNamespace, dict:
            assert fault_of(model, batch=kind(x=torch.tensor([INF, 1.0]))).finding.origin == "data"
        # The model made this one bad before it was replaced.
        assert fault_of(model, {"x": torch.tensor([-1.0, 1.0])}).finding.origin == "received"
    with watch(wrapper := nn.DataParallel(model)):
        assert fault_of(wrapper, SimpleNamespace(x=torch.tensor([INF, 1.0]))).finding.class_name == "Unpacks"


def net() -> nn.Module:
    """Return a model whose norm overflows in float32 where its input is about 1e30."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.LayerNorm(4), c=nn.Linear(4, 1)))


class Refused(Exception):
    """The user's own."""


def refuse_nonfinite(model: nn.Module) -> list[str]:
    """Hooks that raise at the first output that is not finite; the names of the modules that they refused."""
    refused: list[str] = []
    for name, module in model.named_modules():

        def check(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            if not torch.isfinite(output).all():
                refused.append(name)
                raise Refused(name)

        module.register_forward_hook(check)
    return refused


def raised_by(model: nn.Module, x: Tensor) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the tests compare it
        model(x)
    return caught.value


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("action", ["raise", "warn", "record", "call"])
def test_a_hook_that_raises_is_told_what_its_module_made(action: str, tmp_path: Path) -> None:
    """The module that the hook refused is the finding's: in the note, in the report and in output_dir."""
    reports: list[Report] = []
    model = net()
    refused = refuse_nonfinite(model)
    options: Any = {"on_nonfinite": reports.append if action == "call" else action, "output_dir": tmp_path}
    with watch(model, **options) as w, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model(torch.ones(2, 4))
        error = raised_by(model, torch.full((2, 4), 1e30))
    assert (type(error), error.args, error.__cause__, error.__context__) == (Refused, ("b",), None, None)
    finding = w.report().finding
    assert (w._failures.exception_batch, {*refused}) == (1, {finding.module})
    assert (finding.label, finding.origin, finding.batch, finding.sequence) == ("output", "produced", 1, 1)
    (note,) = notes_of(error)
    assert note.startswith("nanwatch: nan first seen in `output` of b (LayerNorm) in batch 1\n")
    assert w.report().to_text() in note
    assert [frame.name for frame in w.report().frames] == ["a", "b", "c", "", "a", "b"]
    assert "b (LayerNorm)" in (tmp_path / "batch-1" / "report.txt").read_text()
    assert [report.batch for report in reports] == [1] * (action == "call")
    assert sum("in batch 1" in str(warning.message) for warning in warned) == (action == "warn")


class Asserting(nn.Module):
    """Asserts that its weight and its input are finite."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        assert bool(torch.isfinite(self.weight).all())
        assert bool(torch.isfinite(x).all())
        return x


def times(factor: float) -> nn.Module:
    """Multiplies in its own code before it calls its part."""
    return nn.Sequential(Does(lambda part, x: part(x * factor), Asserting(1.0)))


@pytest.mark.parametrize(
    ("model", "x", "found"),
    [
        (Asserting(INF), 1.0, ("", "weight", "weight", None)),
        (times(INF), 1.0, ("0.parts.0", "input[0]", "received", "0")),
        (times(1.0), INF, ("", "input[0]", "data", None)),
    ],
)
def test_an_assertion_is_told_what_it_was_given(model: nn.Module, x: float, found: tuple[Any, ...]) -> None:
    """The call that the exception left has a frame in the report, without outputs. A weight may be left unread."""
    with watch(model, rerun=False) as w:
        error = raised_by(model, torch.tensor([x]))
    finding = w.report().finding
    place = (finding.module, finding.label, finding.origin, finding.source_module)
    assert (place, len(notes_of(error))) == (found, 1)
    assert not any(record.role == "output" for record in w.report().frames[-1].records)
    with watch(model, read="inputs outputs", every=2):  # nobody looks at the second batch
        counts = [len(notes_of(raised_by(model, torch.tensor([x])))) for _ in range(2)]
    assert counts == [finding.label != "weight", 0]


@pytest.mark.parametrize("error", [Refused("mine"), KeyboardInterrupt()])
def test_an_exception_without_a_fault_is_left_alone(error: BaseException) -> None:
    """Nothing is noted, nothing found, and the watch knows how its latest batch ended."""

    def refuses(x: Tensor) -> Tensor:
        if x.sum() > 1:
            raise error
        return x

    model = nn.Sequential(Scale(), Does(refuses))
    with watch(model, forecast=False, on_nonfinite="record") as w:
        model(torch.ones(1))
        assert raised_by(model, torch.ones(2)) is error
        model(torch.ones(1))
        assert (notes_of(error), w.report().finding, w._failures.exception_batch) == ([], None, 1)


def test_what_a_forward_catches_is_not_noted() -> None:
    """The batch goes on: a call that a forward tried is no failure."""
    caught: list[BaseException] = []

    def tries(part: nn.Module, x: Tensor) -> Tensor:
        try:
            return part(x / 0)
        except AssertionError as error:
            caught.append(error)
            return x

    model = Does(tries, Asserting(1.0))
    with watch(model) as w:
        model(torch.ones(1))
    assert (len(caught), notes_of(caught[0]), w.report().finding) == (1, [], None)
    assert [(frame.batch, frame.name) for frame in w.frames] == [(0, "")]


def test_an_error_that_a_forward_caught_is_raised_once(tmp_path: Path) -> None:
    """The next bad call raises nothing, nothing is written, and nothing of the batch is kept."""

    def tries(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        with contextlib.suppress(NonFiniteError):
            first(x)
        return second(x)

    with watch(model := Does(tries, Scale(INF), Scale(INF)), output_dir=tmp_path) as w:
        alive = weakref.ref(x := torch.ones(1))
        model(x)
        del x
        gc.collect()
        assert (alive(), w.report().finding.module, [*tmp_path.glob("batch*")]) == (None, "parts.0", [])


def test_a_batch_that_is_not_read_ends_no_run_of_failures() -> None:
    """A finite batch that is read does."""
    with watch(model := Scale(INF), on_nonfinite="record", every=2, forecast=False) as w:
        batches = list[int | None]()
        for factor in (INF, 1.0, INF, INF, 1.0, INF, INF):
            model.factor = factor
            model(torch.ones(1))
            batches.append(w.report().batch)
        assert batches == [0, 0, 0, 0, 0, 0, 6]


def test_a_look_that_fails_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what goes wrong in it nor what the user's function raises is raised; the next batch is watched."""

    def refuse(report: Report) -> None:
        raise LookupError("of the callable")

    def break_down(*_: object) -> None:
        raise LookupError("of the look")

    model = net()
    refuse_nonfinite(model)
    for breaks in (False, True):
        if breaks:
            monkeypatch.setattr("nanwatch.session.reports.state_of", break_down)
        with watch(model, on_nonfinite=refuse) as w:
            error = raised_by(model, torch.full((2, 4), 1e30))
            assert (type(error), error.args, error.__context__) == (Refused, ("b",), None)
            assert len(notes_of(error)) == (not breaks)
            model(torch.ones(2, 4))
            assert (w.batch, w._failures.exception_batch) == (1, 0)


def test_runs_become_rarer_lines() -> None:
    """Of five runs the first, second and fourth have a line each, the end has the sum, and a sink gets each run."""
    model, told = nn.Sequential(Scale(), Scale(), Scale()), list[int | None]()
    sink = type("Failures", (Sink,), {"on_failure": lambda self, report: told.append(report.batch)})()
    with warnings.catch_warnings(record=True) as caught, watch(model, on_nonfinite="warn", sinks=[sink]):
        warnings.simplefilter("always")
        # Places of the first faulty module; None is a good batch.
        for place in [None, 1, 0, None, 2, None, 2, None, 2, None, 2, None]:
            for number, module in enumerate(model):
                module.factor = INF if number == place else 1.0
            model(torch.ones(1))
    assert told == [1, 4, 6, 8, 10]
    assert [str(warning.message).partition("; Watch.report")[0] for warning in caught] == [
        "inf first seen in `output` of 1 (Scale) in batch 1",
        "inf first seen in `output` of 2 (Scale) in batch 4",
        "inf first seen in `output` of 2 (Scale) in batch 8",
        "non-finite batches: 6 of 12, first in '2' 4x, '1' 1x, '0' 1x",
    ]
    assert {warning.category for warning in caught} == {RuntimeWarning}


def test_bad_backwards_in_a_row_are_one_run() -> None:
    """The forwards between them are finite, and end no run."""
    model = nn.Sequential(Sick())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, watch(model, on_nonfinite="warn", gradients=True):
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            nn.init.zeros_(model[0].weight)
            optimizer.zero_grad()
    begins, total = (str(warning.message) for warning in caught)
    assert " in the backward of batch 0; " in begins
    assert total == "non-finite batches: 3 of 3, first in '0' 3x"


def test_a_recomputed_forward_that_fails_first_is_one_failure() -> None:
    """It is no batch of its own, and its second bad call is a consequence."""
    reports, factors = list[Report](), iter((1.0, INF))

    def scaled(part: nn.Module, x: Tensor) -> Tensor:
        part[0].factor = next(factors)
        return part(x).square()  # whose backward asks for its input

    model = Does(partial(checkpoint, scaled, use_reentrant=False), nn.Sequential(Scale(), Scale()))
    with watch(model, on_nonfinite=reports.append):
        model(torch.ones(1, requires_grad=True)).sum().backward()
    assert [(report.finding.module, report.batch) for report in reports] == [("parts.0.0", 0)]


def test_each_raised_failure_is_written_until_there_are_many(tmp_path: Path) -> None:
    """The 21st to the 39th are not written, and one warning says so."""
    model = nn.Sequential(Scale(INF))
    with (
        pytest.warns(RuntimeWarning, match="after 20") as caught,
        watch(model, rerun=False, output_dir=tmp_path),
    ):
        remarks = [" ".join(fault_of(model, torch.ones(1)).finding.remarks) for _ in range(40)]
    assert {path.name for path in tmp_path.glob("batch*")} == {f"batch-{n}" for n in [*range(20), 39]}
    unwritten = [n for n in range(40) if "no re-run was made" in remarks[n]]
    assert (unwritten, len(caught)) == ([*range(20, 39)], 1)


def test_a_bad_checkpoint_is_warned_of_once(tmp_path: Path) -> None:
    """By its guard. It begins no run of batches, and is none for the sum at the end."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, float("nan"))
    options: Any = {"on_nonfinite": "warn", "guard_checkpoints": True}
    with warnings.catch_warnings(record=True) as caught, watch(model, **options):
        warnings.simplefilter("always")
        torch.save(model.state_dict(), tmp_path / "model.pt")
        model(model(torch.ones(1)))
    words = ["torch.save was given 1 ", "nan first seen in `weight` ", "non-finite batches: 2 of 2, "]
    assert [str(warning.message)[: len(word)] for warning, word in zip(caught, words, strict=True)] == words
