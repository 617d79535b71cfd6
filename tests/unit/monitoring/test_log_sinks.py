"""`watch(sinks=...)`: which batches are logged, with what, and that the run never pays for it."""

from __future__ import annotations

import os
import warnings
from math import log2
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.monitoring import log_sinks, sinks
from nanwatch.monitoring.log_sinks import LogEntry, LogSink
from nanwatch.monitoring.sinks import SinkStream
from nanwatch.recording.events import Settings
from nanwatch.recording.recorder import make_recorder
from nanwatch.records.record import Frame, Record
from support.paths import ROOT
from support.toys import Scale, mlp


class Clock:
    """Stands for `monotonic`; goes on when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The limits of time are tested by a clock that stands still: a loaded machine changes nothing."""
    made = Clock()
    monkeypatch.setattr(sinks, "monotonic", made)
    return made


class Kept:
    """A callable target that keeps what it was given."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float | str]]] = []

    def __call__(self, values: dict[str, float | str], batch: int) -> None:
        self.entries.append((batch, values))

    @property
    def batches(self) -> list[int]:
        return [batch for batch, _ in self.entries]


class Entries(LogSink):
    """A sink that keeps the entries themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[LogEntry] = []

    def write(self, entry: LogEntry) -> None:
        self.entries.append(entry)


def frame(batch: int, name: str, high: float) -> Frame:
    """A call whose output ends there, in float16."""
    row = Record("output", "output", (1,), "float16", 0.0, high, True, None)
    return Frame(batch, name, "M", (row,))


def stream_to(sink: LogSink) -> SinkStream:
    """A stream that logs every batch."""
    return SinkStream(make_recorder(Settings(), None), [("the sink Entries", sink)], log_every=1)  # type: ignore[arg-type]


def run(model: nn.Module, batches: int, x: torch.Tensor | None = None) -> None:
    with torch.no_grad():
        for _ in range(batches):
            model(torch.ones(1, 3) if x is None else x)


@pytest.mark.parametrize("forecasts", [True, False])
def test_one_in_so_many_batches_is_logged(forecasts: bool) -> None:
    """Batches 0, 5 and 10 are logged, each with all modules' headroom as torch computes it, for any forecasts."""
    kept, model = Kept(), mlp()
    with nanwatch.watch(model, sinks=kept, log_every=5, forecast=forecasts):
        run(model, 14)
    assert kept.batches == [0, 5, 10]
    largest = max(x.abs().max().item() for x in (model[0].weight, model[0].bias, model[0](torch.ones(1, 3))))
    for _, values in kept.entries:
        assert values["nanwatch_headroom_bits/0"] == pytest.approx(
            log2(torch.finfo(torch.float32).max / largest)
        )
        assert values["nanwatch/is_finite"] == 1.0
        assert {name for name in values if name.startswith("nanwatch_headroom_bits/")} == {
            f"nanwatch_headroom_bits/{name}" for name in ("0", "1", "2", "(root)")
        }


@pytest.mark.parametrize("log_every", [5, 6, 7, 8])
@pytest.mark.parametrize("forecasts", [True, False])
def test_every_and_log_every_go_together(log_every: int, forecasts: bool) -> None:
    """Only batches that are looked at can be logged, and the first of them that is due is."""
    kept, model = Kept(), mlp()
    with nanwatch.watch(model, sinks=kept, log_every=log_every, every=4, forecast=forecasts):
        run(model, 22)
    assert kept.batches == [0, 8, 16]


def test_a_modulus_beyond_its_parts_does_not_end_the_log() -> None:
    """A finite complex number whose modulus is inf has no power of two and no headroom."""
    kept, model = Kept(), nn.Sequential(Scale())
    with nanwatch.watch(model, sinks=kept, log_every=1):
        run(model, 2, torch.tensor([3e38 + 3e38j]))
    assert kept.entries == [(0, {"nanwatch/is_finite": 1.0}), (1, {"nanwatch/is_finite": 1.0})]


def test_forecasts_come_out_the_same_with_a_log() -> None:
    """The forecasts see the batches that they asked for, also where the log asks for others."""

    def told(**options: Any) -> list[str]:
        model = nn.Sequential(Scale())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with nanwatch.watch(model, on_nonfinite="record", **options):
                for i in range(400):
                    model[0].factor = 2.0 ** (i / 30)
                    run(model, 1, torch.ones(2, dtype=torch.float16))
        return [str(one.message) for one in caught if "overflow expected" in str(one.message)]

    plain = told()
    assert plain
    assert told(sinks=Kept(), log_every=7) == plain


def test_a_forecast_is_logged_when_it_is_told() -> None:
    """With the batch that it was told in, whether that one is to be logged or not."""
    kept, model = Kept(), nn.Sequential(Scale())
    watch = nanwatch.watch(model, sinks=kept, log_every=10_000, on_nonfinite="record")
    with watch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(400):
            model[0].factor = 2.0 ** (i / 30)
            run(model, 1, torch.ones(2, dtype=torch.float16))
    entries = [values["nanwatch/forecast"] for _, values in kept.entries if "nanwatch/forecast" in values]
    told = [one for entry in entries for one in entry.split("\n\n")]  # of one batch in one entry
    assert told == [str(one.message) for one in caught if "overflow expected" in str(one.message)]
    assert told
    first = kept.entries[1][1]
    expected = [v for name, v in first.items() if name.startswith("nanwatch_forecast_batch/")]
    assert len(expected) == len(entries[0].split("\n\n"))
    for batch, words in zip(expected, told, strict=False):
        assert f"near batch {int(batch):,}" in words


@pytest.mark.parametrize("action", ["raise", "record", "warn"])
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_fault_is_logged_at_once(action: Any) -> None:
    """Its flag is 0 and its words are the finding's; no number of the non-finite batch is logged beside it."""
    kept, model = Kept(), nn.Sequential(Scale())
    with nanwatch.watch(model, sinks=kept, log_every=100, on_nonfinite=action):
        run(model, 3)
        model[0].factor = float("inf")
        if action == "raise":
            with pytest.raises(nanwatch.NonFiniteError):
                run(model, 1)
        else:
            run(model, 1)
    assert kept.batches == [0, 3]
    assert kept.entries[1][1]["nanwatch/is_finite"] == 0.0
    assert "inf" in str(kept.entries[1][1]["nanwatch/finding"])
    assert len(kept.entries[1][1]) == 2


def test_faults_in_a_row_are_rate_limited_too() -> None:
    """A run that goes on with nan for ever logs as often as any other; the next clean batch that is due, too."""
    kept, model = Kept(), nn.Sequential(Scale(float("nan")))
    with nanwatch.watch(model, sinks=kept, log_every=10, on_nonfinite="record"):
        run(model, 25)
        model[0].factor = 1.0
        run(model, 1)
    assert kept.batches == [0, 10, 20, 25]
    assert [values["nanwatch/is_finite"] for _, values in kept.entries] == [0.0, 0.0, 0.0, 1.0]


def test_a_gradient_that_a_step_would_take_is_a_fault_of_the_log() -> None:
    """With gradients=True, what stops a step is logged before it is raised."""
    kept, model = Kept(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanwatch.watch(model, sinks=kept, log_every=100, gradients=True):
        (model(torch.ones(1, 3)) * float("inf")).sum().backward()
        with pytest.raises(nanwatch.NonFiniteError):
            optimizer.step()
    assert [values["nanwatch/is_finite"] for _, values in kept.entries] == [1.0, 0.0]


def test_a_log_that_takes_too_long_is_written_less_often(clock: Clock) -> None:
    """An entry that took one second delays the next by fifty. The first, which opens files, does not count."""
    kept, model = Kept(), mlp()

    def slow(values: dict[str, float | str], batch: int) -> None:
        kept(values, batch)
        clock.now += 1.0

    with nanwatch.watch(model, sinks=slow, log_every=2):
        for _ in range(130):
            run(model, 1)
            clock.now += 1.0
    assert kept.batches[:3] == [0, 2, 53]
    assert kept.batches[3] == 53 + 51


def test_an_error_in_the_logger_is_one_warning() -> None:
    """The run goes on, nothing more is logged, and the watch still finds what goes wrong."""
    calls = []

    def broken(values: dict[str, float | str], batch: int) -> None:
        calls.append(batch)
        raise OSError("No space left on device\nand more")

    model = nn.Sequential(Scale())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nanwatch.watch(model, sinks=broken, log_every=1, on_nonfinite="record") as watch:
            run(model, 5)
            model[0].factor = float("inf")
            run(model, 2)
            assert watch.report().finding is not None
    assert calls == [0]
    (message,) = [str(one.message) for one in caught]
    assert "logs no more to the sink broken, which raised OSError: No space left on device;" in message
    assert "and more" not in message


def test_the_numbers_of_the_model_are_unchanged() -> None:
    """A training with a log ends with the very weights of one without."""

    def trained(**options: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(1)
        with nanwatch.watch(model, enabled=bool(options), **options):
            for _ in range(12):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().sum().backward()
                optimizer.step()
        return [x.detach().clone() for x in model.parameters()]

    for mine, other in zip(trained(sinks=Kept(), log_every=1), trained(), strict=True):
        assert torch.equal(mine, other)


def test_a_function_may_call_the_model() -> None:
    """A logger's own call of the model is no batch."""
    model = mlp()
    kept = Kept()

    def probing(values: dict[str, float | str], batch: int) -> None:
        kept(values, batch)
        run(model, 1)

    with nanwatch.watch(model, sinks=probing, log_every=1) as watch:
        run(model, 3)
        assert watch.batch == 2
    assert kept.batches == [0, 1, 2]


def test_nothing_is_logged_of_a_watch_that_is_off_or_over() -> None:
    """enabled=False logs nothing and opens nothing; after stop() nothing comes."""
    kept, model = Kept(), mlp()
    with nanwatch.watch(model, sinks=kept, enabled=False):
        run(model, 2)
    with nanwatch.watch(model, sinks=kept, log_every=1):
        run(model, 1)
    run(model, 3)
    assert kept.batches == [0]


def test_a_forked_child_logs_nothing() -> None:
    """Its copy of a tracker has no thread that would write."""
    reader, writer = os.pipe()
    model = mlp()
    with nanwatch.watch(
        model, sinks=lambda values, batch: os.write(writer, f"{batch},".encode()), log_every=1
    ):
        run(model, 1)
        child = os.fork()
        if child == 0:
            run(model, 2)
            os._exit(0)
        os.waitpid(child, 0)
        run(model, 1)
    os.close(writer)
    assert os.read(reader, 100) == b"0,1,"
    os.close(reader)


def test_a_large_model_has_curves_for_its_worst_modules() -> None:
    """The 256 of 300 modules with the least headroom get a curve, and keep it when others have less."""
    sink = Entries()
    logged = stream_to(sink)
    for batch, order in enumerate((1, -1)):
        for i in range(300):
            logged.on_frame(frame(batch, f"m{i}", 1.0 + i if order == 1 else 300.0 - i))
        logged.batch_ended(batch)
        logged.settle(batch)
    expected = {f"nanwatch_headroom_bits/m{i}" for i in range(300 - 256, 300)}
    for entry in sink.entries:
        assert {tag for tag in entry.scalars if tag.startswith("nanwatch_headroom_bits/")} == expected
    assert [entry.texts["nanwatch/headroom_module"] for entry in sink.entries] == [
        "m299 output, float16",
        "m0 output, float16",
    ]


def test_a_batch_that_went_wrong_leaves_nothing_behind() -> None:
    """The frames that were taken before a fault are no part of the next entry."""
    sink = Entries()
    logged = stream_to(sink)
    logged.on_frame(frame(0, "m", 60000.0))
    logged.batch_ended(1)
    logged.settle(1)
    logged.on_frame(frame(2, "n", 1.0))
    logged.batch_ended(2)
    logged.settle(2)
    (entry,) = sink.entries
    assert entry.batch == 2
    assert "nanwatch_headroom_bits/m" not in entry.scalars


def test_the_docs_have_every_tag() -> None:
    """docs/trackers.md names what is logged."""

    text = (ROOT / "docs" / "trackers.md").read_text()
    for tag in (log_sinks.IS_FINITE, log_sinks.LEAST, log_sinks.PLACE, log_sinks.TOLD, log_sinks.FINDING):
        assert f"`{tag}`" in text
    for group in log_sinks.GROUPS[1:]:
        assert f"`{group}/" in text
