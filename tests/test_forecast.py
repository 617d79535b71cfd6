"""Forecasts of overflow: right within their own interval on trainings that diverge, silent on those that do not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.forecast import Forecast, Forecaster
from nanwatch.frame import FrameRows

END = 65504.0


def frame(batch: int, bits: float, name: str = "m") -> FrameRows:
    row = ("output", "output", (2,), "float16", 0.0, END * 2.0**-bits, True, None, "")
    return FrameRows(batch, name, "Linear", [row], False)


def run(bits: Callable[[int], float], batches: int) -> tuple[list[Forecast], int | None]:
    """What is foretold of one output, and the batch in which it has no headroom left."""
    forecaster, found = Forecaster(), []
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
    forecaster, found = Forecaster(), []
    for batch in range(2600):
        if forecaster.is_due(batch):
            for name in ("a", "b"):
                forecaster.add(frame(batch, 8 - 3e-3 * batch, name))
            found += forecaster.end(batch)
    told = {name: [one for one in found if one.module == name] for name in ("a", "b")}
    assert len(told["a"]) == len(told["b"]) == 2


def test_most_batches_are_not_looked_at() -> None:
    """Of a level run every batch at first, then one in sixteen."""
    forecaster = Forecaster()
    due = []
    for batch in range(2000):
        if forecaster.is_due(batch):
            due.append(batch)
            forecaster.add(frame(batch, 9.0))
            forecaster.end(batch)
    assert due[:60] == list(range(60))
    assert {b - a for a, b in zip(due[-50:], due[-49:], strict=False)} == {16}


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
    forecaster = Forecaster()
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
    forecaster = Forecaster()
    told: list[str] = []
    for batch in range(30):
        for module, step in (("a", 0.4), ("b", 0.39)):
            row = ("output", "output", (4,), "float16", 0.1, 65504 / 2 ** (15 - step * batch), True, None, "")
            forecaster.add(FrameRows(batch, module, "Linear", [row]))
        told += [one.module for one in forecaster.end(batch)]
    assert told == ["a", "b"]
