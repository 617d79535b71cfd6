"""Forecasts of overflow: right within their own interval on trainings that diverge, silent on those that do not."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch import forecast
from nanwatch.forecast import Forecast, Forecaster
from nanwatch.frame import FrameRows
from nanwatch.largest import Largest

END = 65504.0


class Clock:
    """Stands for `monotonic`; each look at it takes a while."""

    now = 0.0
    a_look = 0.0  # seconds

    def __call__(self) -> float:
        self.now += self.a_look
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What is looked at depends on the time that looks take: by a clock that stands still it takes none."""
    made = Clock()
    monkeypatch.setattr(forecast, "monotonic", made)
    return made


class Told:
    """A forecaster that is told as by a recorder."""

    def __init__(self) -> None:
        self.forecaster, self.largest = Forecaster(), Largest()
        self.is_due, self.add = self.forecaster.is_due, self.largest.add

    def end(self, batch: int) -> list[Forecast]:
        gathered, names, values = self.largest.take()
        self.forecaster.meet(names)
        return self.forecaster.end(batch, values) if gathered == batch else []


def frame(batch: int, bits: float, name: str = "m") -> FrameRows:
    row = ("output", "output", (2,), "float16", 0.0, END * 2.0**-bits, True, None, "")
    return FrameRows(batch, name, "Linear", [row], False)


def run(bits: Callable[[int], float], batches: int) -> tuple[list[Forecast], int | None]:
    """What is foretold of one output, and the batch in which it has no headroom left."""
    forecaster, found = Told(), []
    for batch in range(batches):
        now = bits(batch)
        if now <= 0:
            return found, batch
        if forecaster.is_due(batch):
            forecaster.add(frame(batch, now))
            found += forecaster.end(batch)
    return found, None


@pytest.mark.parametrize("length", [60, 200, 500, 2000])
def test_a_fall_is_foretold(length: int) -> None:
    """Ten noisy, bent falls of so many batches, each after a while without any: at least eight are told rightly."""
    rng = np.random.default_rng(length)
    right = 0
    for _ in range(10):
        start, noise, bend, calm = (
            rng.uniform(6, 14),
            rng.uniform(0.02, 0.5),
            rng.uniform(0.8, 1.3),
            rng.integers(0, length),
        )
        found, hit = run(
            lambda b: start * (1 - (max(0, b - calm) / length) ** bend) + rng.normal(0, noise),  # noqa: B023
            calm + 2 * length,
        )
        assert hit is not None
        right += bool(found) and abs(found[0].batch - hit) <= found[0].plus_minus
    assert right >= 8


@pytest.mark.parametrize(
    "bits",
    [
        lambda b, base, noise: base + noise,
        lambda b, base, noise: max(3.0, base + 6 - 0.7 * np.log2(1 + b)) + noise,
        lambda b, base, noise: 0.5 * base + 3 + 3 * np.exp(-b / 200) + noise,
        lambda b, base, noise: base + np.sin(b / 150) + noise,
        lambda b, base, noise: base + (3 if b % 100 else 0) + noise,
    ],
    ids=["level", "log", "settling", "waves", "evaluations"],
)
def test_a_healthy_run_is_silent(bits: Callable[[int, float, float], float]) -> None:
    """Of ten runs that level off, settle or swing, each of 3,000 batches, nothing is foretold."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        base, spread = rng.uniform(4, 12), rng.uniform(0.05, 0.5)
        found, _ = run(lambda b: bits(b, base, rng.normal(0, spread)), 3000)  # noqa: B023
        assert found == []


def test_a_module_is_named_once_in_a_thousand_batches() -> None:
    """A fall that goes on is told again only after a while; each module by itself."""
    forecaster, found = Told(), []
    for batch in range(2600):
        if forecaster.is_due(batch):
            for name in ("a", "b"):
                forecaster.add(frame(batch, 8 - 3e-3 * batch, name))
            found += forecaster.end(batch)
    told = {name: [one for one in found if one.module == name] for name in ("a", "b")}
    assert len(told["a"]) == len(told["b"]) == 2


def test_most_batches_are_not_looked_at() -> None:
    """Of a level run every batch at first, then one in sixteen."""
    forecaster = Told()
    due = []
    for batch in range(2000):
        if forecaster.is_due(batch):
            due.append(batch)
            forecaster.add(frame(batch, 9.0))
            forecaster.end(batch)
    assert due[:60] == list(range(60))
    assert {b - a for a, b in zip(due[-50:], due[-49:], strict=False)} == {16}


def looks(
    forecaster: Told, batches: range, clock: Clock, step: float, bits: Callable[[int], float]
) -> list[int]:
    """The batches that are looked at, `step` seconds from one to the next."""
    due = []
    for batch in batches:
        clock.now += step
        if forecaster.is_due(batch):
            due.append(batch)
            forecaster.add(frame(batch, bits(batch)))
            forecaster.end(batch)
    return due


@pytest.mark.parametrize("step", [0.001, 0.01, 0.063, 1.0])
@pytest.mark.parametrize("a_look", [0.0001, 0.0005, 0.005])
def test_looks_take_a_five_hundredth_of_the_time(a_look: float, step: float, clock: Clock) -> None:
    """And 20 ms at first, but for one look in 16 batches; of the first 64 batches as many as that allows."""
    forecaster = Told()
    clock.a_look = a_look  # that is from the begin to the end, and is_due takes as long
    due = looks(
        forecaster, range(3000), clock, step, lambda b: 15 - (b % 40) * 0.3
    )  # now and then it falls fast
    assert len(due) <= 3000 / 16 + (0.02 + clock.now / 500) / a_look + 1
    early = [batch for batch in due if batch < 64]
    assert len(early) >= min(64, max(4, int((0.02 + 64 * step / 500) / a_look)))
    assert max(b - a for a, b in pairwise(due)) <= 16


def test_a_fast_fall_after_a_calm_is_followed_closely(clock: Clock) -> None:
    """Time that was not used is there when it is wanted: from the first look that sees the fall every batch."""
    forecaster = Told()
    clock.a_look = 0.0002
    calm = looks(forecaster, range(5000), clock, 0.06, lambda b: 15.0)
    assert {b - a for a, b in zip(calm[-100:], calm[-99:], strict=False)} == {16}
    due = looks(forecaster, range(5000, 5040), clock, 0.06, lambda b: 15 - 0.3 * (b - 5000))
    assert due[0] <= 5016
    assert due == list(range(due[0], 5040))


def test_what_has_no_headroom_is_passed_over() -> None:
    """Integers, zeros, inputs, masks and what is not finite leave no trace and no error."""
    rows = [
        ("output", "output", (2,), "int64", 0.0, 3.0, True, None, ""),
        ("output", "output", (2,), "float16", 0.0, 0.0, True, None, ""),
        ("input[0]", "input", (2,), "float16", 0.0, 6e4, True, None, ""),
        ("mask", "buffer", (2,), "float16", 0.0, END, True, None, "mask"),
        ("output", "output", (2,), "float16", 0.0, float("inf"), False, None, ""),
        ("output", "output", None, "", None, None, None, None, "None"),
    ]
    forecaster = Told()
    for batch in range(50):
        forecaster.add(FrameRows(batch, "m", "M", rows, False))  # type: ignore[arg-type]
        assert forecaster.end(batch) == []


def test_the_sentence() -> None:
    """All that a user needs to know is in it."""
    text = str(Forecast("decoder.wo", "output", "float16", 1.94, 0.4, 5300, 600))
    assert text == (
        "`output` of decoder.wo: headroom 1.9 bits of float16, losing 0.4 bits per 100 batches: overflow expected"
        " near batch 5,300 (± 600)"
    )


class Growing(nn.Module):
    """Float16 numbers that double every twenty batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = 0

    def forward(self, x: Tensor) -> Tensor:
        self.batch += 1
        return x * 2.0 ** (self.batch / 20)


def run_on(model: nn.Module) -> None:
    while True:
        model(torch.ones(3, dtype=torch.float16))


@pytest.mark.parametrize("implementation", ["native", "python"])
def test_watch_warns(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the overflow comes, with both recorders, and not when it is switched off."""
    if implementation == "python":
        monkeypatch.setattr("nanwatch._extension.C", None)

    def warned(**options: bool) -> tuple[list[str], int]:
        model = nn.Sequential(Growing())
        with warnings.catch_warnings(record=True) as caught, nanwatch.watch(model, **options):  # type: ignore[arg-type]
            warnings.simplefilter("always")
            with pytest.raises(nanwatch.NonFiniteError) as error:
                run_on(model)
        end = error.value.report.batch
        assert end is not None
        return [str(one.message) for one in caught if "overflow expected" in str(one.message)], end

    told, end = warned()
    assert len(told) == 2  # the module and its parent
    batch, margin = map(int, re.findall(r"near batch (\d+) \(± (\d+)\)", told[0])[0])
    assert abs(batch - end) <= margin
    assert warned(forecast=False) == ([], end)


@pytest.mark.parametrize("implementation", ["native", "python"])
def test_no_frame_is_built_for_a_forecast(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is followed over the batches is numbers: without a fault or a trace the listener is told of no call."""
    if implementation == "python":
        monkeypatch.setattr("nanwatch._extension.C", None)
    told: list[FrameRows] = []
    monkeypatch.setattr(nanwatch.Watch, "frame_recorded", lambda self, frame: told.append(frame))
    model = nn.Sequential(Growing())
    with warnings.catch_warnings(record=True) as caught, nanwatch.watch(model):
        warnings.simplefilter("always")
        for _ in range(200):
            model(torch.ones(3, dtype=torch.float16))
    assert any("overflow expected" in str(one.message) for one in caught)
    assert told == []


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def trained(seed: int, lr: float, steps: int, *, diverges: bool) -> tuple[list[str], int | None]:
    """A training under float16 autocast: the warnings, and the batch of the overflow."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(16), Block(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    end = None
    with warnings.catch_warnings(record=True) as caught, nanwatch.watch(model, microscope=False):
        warnings.simplefilter("always")
        for batch in range(steps):
            x = torch.randn(8, 16)
            try:
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)
            except nanwatch.NonFiniteError:
                end = batch
                break
            # A loss that has no least value drives the weights on for ever, and its gradient does not grow with them.
            loss = (out.float() - x.sum(1, keepdim=True)).square().mean()
            loss = -torch.log(out.float().square().mean() + 1e-6) if diverges else loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return [str(one.message) for one in caught if "overflow expected" in str(one.message)], end


@pytest.mark.slow
def test_trainings_that_diverge_are_foretold() -> None:
    """Ten of them, at ten learning rates: in at least eight the overflow comes within the interval that was told."""
    rates = [1e-3, 3e-3, 5e-4, 1e-2, 2e-3, 3e-4, 1e-3, 5e-3, 2e-4, 4e-3]
    right = 0
    for seed, rate in enumerate(rates):
        told, end = trained(seed, rate, 8000, diverges=True)
        assert end is not None
        if told:
            batch, margin = (
                int(number.replace(",", ""))
                for number in re.findall(r"near batch ([\d,]+) \(± ([\d,]+)\)", told[0])[0]
            )
            right += abs(batch - end) <= margin
    assert right >= 8


@pytest.mark.slow
def test_healthy_trainings_are_silent() -> None:
    """Fifty that learn a sum, at learning rates from slow to fast."""
    for seed in range(50):
        assert trained(seed, [1e-4, 1e-3, 3e-3, 1e-2, 3e-2][seed % 5], 300, diverges=False) == ([], None)


def test_a_fast_fall_of_one_tensor_takes_no_points_from_the_others():
    """Two modules that fall alike, one a little faster: both are foretold, in the same batch."""
    forecaster = Told()
    told: list[str] = []
    for batch in range(30):
        for module, step in (("a", 0.4), ("b", 0.39)):
            row = ("output", "output", (4,), "float16", 0.1, 65504 / 2 ** (15 - step * batch), True, None, "")
            forecaster.add(FrameRows(batch, module, "Linear", [row]))
        told += [one.module for one in forecaster.end(batch)]
    assert told == ["a", "b"]


def test_threads_of_one_watch_do_not_disturb_each_other() -> None:
    """Batches that end at once in four threads: none raises, and each that is looked at is looked at whole."""
    errors: list[Exception] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(3):
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60)))
            go = threading.Barrier(4)

            def run(model: nn.Module = model, go: threading.Barrier = go) -> None:
                go.wait()
                with torch.no_grad():
                    for _ in range(100):
                        try:
                            model(torch.ones(1, 8))
                        except Exception as error:
                            errors.append(error)

            with nanwatch.watch(model):
                threads = [threading.Thread(target=run) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []


def test_the_lines_of_many_falls_take_turns(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there is not the time for all that fall in one look, the next look goes on where it stopped."""
    seen: list[str] = []

    def slow(x: object, y: object, balance: object) -> None:
        seen.append("a line")
        clock.now += 0.015

    monkeypatch.setattr(forecast, "_line", slow)
    forecaster = Forecaster()
    forecaster.meet([(f"m{i}", "output", "float16") for i in range(6)])
    turns = []
    for batch in range(20):
        clock.now += 1000
        forecaster.end(batch, np.full(6, 2.0 ** (8 + batch / 4)).tobytes())
        turns.append((len(seen), forecaster._turn))
        seen.clear()
    assert {count for count, _ in turns if count} == {2}
    assert {turn for count, turn in turns if count} == {0, 2, 4}
