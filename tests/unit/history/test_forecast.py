"""Forecasts of overflow: right within their own interval on trainings that diverge, silent on those that do not."""

import re
import warnings
from collections.abc import Callable
from itertools import count, pairwise

import numpy as np
import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.history.forecast import Forecast, Forecaster
from support.toys import Does, fault_of

END = 65504.0


def run(bits: Callable[[int], float], batches: int) -> tuple[list[Forecast], int | None]:
    """Return the forecasts for one output, and the batch in which it has no headroom left."""
    forecaster, forecasts = Forecaster(), list[Forecast]()
    forecaster.add_names([("m", "output", "float16")])
    for batch in range(batches):
        now = bits(batch)
        if now <= 0:
            return forecasts, batch
        if batch >= forecaster.next:
            forecast = forecaster.end(batch, np.array([END * 2.0**-now]).tobytes())
            forecasts += [] if forecast is None else [forecast]
    return forecasts, None


def within(forecast: Forecast, hit: int | None) -> bool:
    return hit is not None and abs(forecast.batch - hit) <= forecast.plus_minus


@pytest.mark.parametrize("length", [60, 200, 500, 2000])
def test_a_fall_is_foretold(length: int) -> None:
    """Twenty noisy, bent falls of so many batches, each after a while without any: what is told holds in 7 of 10."""
    rng = np.random.default_rng(length)
    held: list[bool] = []
    for _ in range(20):
        start, noise = rng.uniform(6, 14), rng.uniform(0.02, 0.2)
        bend, calm = rng.uniform(0.8, 1.3), rng.integers(0, length)
        forecasts, hit = run(
            lambda b: start * (1 - (max(0, b - calm) / length) ** bend) + rng.normal(0, noise),  # noqa: B023
            calm + 2 * length,
        )
        assert hit is not None
        assert len(forecasts) <= 3
        held += [within(forecast, hit) for forecast in forecasts]
    assert len(held) >= 5
    assert sum(held) >= 0.7 * len(held)


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
    rng = np.random.default_rng(1)
    for _ in range(10):
        base, spread = rng.uniform(4, 12), rng.uniform(0.05, 0.5)
        forecasts, _ = run(lambda b: bits(b, base, rng.normal(0, spread)), 3000)  # noqa: B023
        assert forecasts == []


def test_a_forecast_that_no_longer_holds_is_replaced() -> None:
    """A learning rate that falls to a third: a second line says what it replaces, and is right."""
    forecasts, hit = run(lambda b: 10 - 0.05 * min(b, 150) - 0.05 / 3 * max(0, b - 150), 500)
    assert 2 <= len(forecasts) <= 3
    assert within(forecasts[-1], hit)
    for before, after in pairwise(forecasts):
        assert after.replaces == before.batch
        assert str(after).endswith(f"; replaces the forecast of batch {before.batch}")


def growing() -> nn.Module:
    """Float16 numbers that double every twenty batches."""
    batches = count()
    return nn.Sequential(Does(lambda x: x * 2.0 ** (next(batches) / 20)))


def run_on(model: nn.Module) -> None:
    while True:
        model(torch.ones(3, dtype=torch.float16))


@pytest.mark.parametrize("implementation", ["native", "python"])
def test_watch_warns(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the overflow comes, with both recorders, and not when it is switched off."""
    if implementation == "python":
        monkeypatch.setattr("nanwatch.numerics._extension.C", None)

    def warned(**options: bool) -> tuple[list[str], int]:
        model = growing()
        with warnings.catch_warnings(record=True) as caught, nanwatch.watch(model, **options):  # type: ignore[arg-type]
            warnings.simplefilter("always")
            report = fault_of(run_on, model)
        messages = [str(warning.message) for warning in caught]
        return [text for text in messages if "overflow expected" in text], report.batch

    (text,), end = warned()
    assert "1 more module follows" in text  # its parent
    batch, margin = re.findall(r"near batch ([\d,]+) \(± ([\d,]+)\)", text)[0]
    assert abs(int(batch.replace(",", "")) - end) <= int(margin.replace(",", ""))
    assert warned(forecast=False) == ([], end)
