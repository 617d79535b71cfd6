"""Forecasts of layers that leave a block format: which layer, by which measure, near which batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.instrumentation.linear_formats import FormatLoss, LinearFormats
from nanwatch.monitoring.forecast import Forecast
from nanwatch.monitoring.format_forecast import FormatForecaster


class Given:
    """Losses of two layers by batch, as a reader would have found them."""

    formats = ("mxfp4",)

    def __init__(self, planted: Callable[[int], FormatLoss]) -> None:
        self._planted = planted

    def found(self, batch: int) -> tuple[FormatLoss, ...]:
        calm = FormatLoss("calm", "input", "mxfp4", batch, 18.0 + batch % 3, 0.02, 0.1)
        unread = FormatLoss("unread", "input", "mxfp4", batch, reason="int64")
        return self._planted(batch)._replace(module="planted", batch=batch), calm, unread


LOSS = FormatLoss("", "weight", "mxfp4", 0, 19.0, 0.0, 0.05)
PLANTED = {
    "SQNR": (lambda batch: LOSS._replace(sqnr=19 - batch / 100), 900),
    "become zero": (lambda batch: LOSS._replace(flushed=0.05 * 2 ** (batch / 200)), 664),
    "saturate": (lambda batch: LOSS._replace(saturated=0.001 + batch / 2000), 998),
}


@pytest.mark.parametrize("measure", PLANTED)
def test_a_layer_that_leaves_a_format(measure: str) -> None:
    """It is forecast, by its measure, before it is out, and the interval holds the batch at which it is."""
    planted, out = PLANTED[measure]
    forecaster = FormatForecaster(cast(LinearFormats, Given(planted)))
    told = [(batch, one) for batch in range(0, out, 10) for one in forecaster.end(batch)]
    assert told
    for batch, one in told:
        assert (one.module, one.label, one.dtype) == ("planted", f"weight {measure}", "mxfp4")
        assert batch < out
        assert abs(one.batch - out) <= max(one.plus_minus, 15)
        assert measure in str(one)
        assert "mxfp4" in str(one)


def test_layers_that_stay_are_not_forecast() -> None:
    """Neither one that is out from the beginning nor one that gets better."""
    for planted in (
        lambda _: LOSS._replace(sqnr=4.0, flushed=0.9),
        lambda batch: LOSS._replace(sqnr=11 + batch / 100, flushed=0.45 * 2 ** (-batch / 300)),
    ):
        forecaster = FormatForecaster(cast(LinearFormats, Given(planted)))
        assert not [one for batch in range(0, 1000, 10) for one in forecaster.end(batch)]


@pytest.mark.slow
def test_outliers_that_grow_in_one_layer() -> None:
    """A watch names that layer, before half of its weights become zero; it has the lowest SQNR."""

    class Told(nanwatch.Sink):
        def __init__(self) -> None:
            self.forecasts: list[tuple[int, Forecast]] = []

        def on_forecast(self, batch: int, forecast: Forecast) -> None:
            self.forecasts.append((batch, forecast))

    torch.manual_seed(0)
    model, told = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)), Told()
    x, out = torch.randn(16, 32), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nanwatch.watch(model, formats="mxfp4", formats_every=4, sinks=told) as watch:
            for batch in range(420):
                with torch.no_grad():
                    model[1].weight[:, 0] *= 1.008
                model(x)
                flushed = {(one.module, one.operand): one.flushed for one in watch.formats}
                if out is None and flushed["1", "weight"] > 0.5:
                    out = batch
            worst = watch.formats[0]
    assert out is not None
    assert told.forecasts
    assert {one.module for _, one in told.forecasts} == {"1"}
    batch, first = told.forecasts[0]
    assert batch < out - 20
    assert abs(first.batch - out) <= 2 * first.plus_minus
    assert (worst.module, worst.operand) == ("1", "weight")
