"""Forecasts of overflow: right within their own interval on trainings that diverge, silent on those that do not."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.history.forecast import Forecast, Forecaster
from nanwatch.recording.recorder import PeakMagnitudes
from nanwatch.records.record import Frame, Record

END = 65504.0


class Fed:
    """A forecaster that gets the peaks of a recorder."""

    def __init__(self) -> None:
        self.forecaster, self.largest = Forecaster(), PeakMagnitudes(threading.RLock())
        self.is_due = self.forecaster.is_due

    def add(self, frame: Frame) -> None:
        self.largest.add(frame)

    def end(self, batch: int) -> list[Forecast]:
        gathered, names, values = self.largest.take()
        self.forecaster.meet(names)
        forecast = self.forecaster.end(batch, values) if gathered == batch else None
        return [] if forecast is None else [forecast]


def frame(batch: int, bits: float, name: str = "m") -> Frame:
    row = Record("output", "output", (2,), "float16", 0.0, END * 2.0**-bits, True, None)
    return Frame(batch, name, "Linear", (row,))


def run(bits: Callable[[int], float], batches: int) -> tuple[list[Forecast], int | None]:
    """Return the forecasts for one output, and the batch in which it has no headroom left."""
    forecaster, found = Fed(), []
    for batch in range(batches):
        now = bits(batch)
        if now <= 0:
            return found, batch
        if forecaster.is_due(batch):
            forecaster.add(frame(batch, now))
            found += forecaster.end(batch)
    return found, None


def within(one: Forecast, hit: int | None) -> bool:
    return hit is not None and abs(one.batch - hit) <= one.plus_minus


@pytest.mark.parametrize("length", [60, 200, 500, 2000])
def test_a_fall_is_foretold(length: int) -> None:
    """Twenty noisy, bent falls of so many batches, each after a while without any: what is told holds in 7 of 10."""
    rng = np.random.default_rng(length)
    told: list[bool] = []
    for _ in range(20):
        start, noise, bend, calm = (
            rng.uniform(6, 14),
            rng.uniform(0.02, 0.2),
            rng.uniform(0.8, 1.3),
            rng.integers(0, length),
        )
        found, hit = run(
            lambda b: start * (1 - (max(0, b - calm) / length) ** bend) + rng.normal(0, noise),  # noqa: B023
            calm + 2 * length,
        )
        assert hit is not None
        assert len(found) <= 3
        told += [within(one, hit) for one in found]
    assert len(told) >= 5
    assert sum(told) >= 0.7 * len(told)


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
    """Ten runs of 3,000 batches that level off, settle or swing get no forecast."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        base, spread = rng.uniform(4, 12), rng.uniform(0.05, 0.5)
        found, _ = run(lambda b: bits(b, base, rng.normal(0, spread)), 3000)  # noqa: B023
        assert found == []


def test_a_forecast_that_no_longer_holds_is_replaced() -> None:
    """A learning rate that falls to a third: a second line says what it replaces, and is right."""
    found, hit = run(lambda b: 10 - 0.05 * min(b, 150) - 0.05 / 3 * max(0, b - 150), 500)
    assert 2 <= len(found) <= 3
    assert within(found[-1], hit)
    for before, after in pairwise(found):
        assert after.replaces == before.batch
        assert str(after).endswith(f"; replaces the forecast of batch {before.batch}")


def interval(line: str) -> tuple[int, int]:
    """The batch and the margin of a line."""
    batch, margin = re.findall(r"near batch ([\d,]+) \(± ([\d,]+)\)", line)[0]
    return int(batch.replace(",", "")), int(margin.replace(",", ""))


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
        monkeypatch.setattr("nanwatch.numerics._extension.C", None)

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
    assert len(told) == 1
    assert "1 more module follows" in told[0]  # its parent
    batch, margin = interval(told[0])
    assert abs(batch - end) <= margin
    assert warned(forecast=False) == ([], end)
