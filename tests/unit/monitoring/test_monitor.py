"""The monitor: who is told of the end of a batch, and when the recorder gathers peaks."""

from __future__ import annotations

import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nanwatch.monitoring.forecast import Forecast
from nanwatch.monitoring.monitor import Monitor, Warnings
from nanwatch.monitoring.sinks import Sink


class Recorder:
    """Gathers the peaks of one weight, and knows which batch is the latest."""

    def __init__(self) -> None:
        self.gathers_peaks = False
        self.batch = -1
        self.given = False

    def subscribe(self, events: int) -> Any:
        return SimpleNamespace(active=False, remove=lambda: None)

    def take_peaks(self) -> tuple[int, list[tuple[str, str, str]], bytes]:
        new = [] if self.given else [("fc", "weight", "float16")]
        self.given = True
        return self.batch, new, array("d", [2.0 ** (self.batch / 40)]).tobytes()


class Told(Sink):
    def __init__(self) -> None:
        self.forecasts: list[Forecast] = []

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        self.forecasts.append(forecast)


def monitored(*, forecasts: bool, every: int = 1) -> tuple[Recorder, Told, Monitor]:
    recorder, told = Recorder(), Told()
    model = nn.Sequential(nn.Linear(2, 2))
    monitor = Monitor(
        recorder,  # type: ignore[arg-type]
        model,
        [("Told", told)],
        [],
        every=every,
        log_every=50,
        forecasts=forecasts,
    )
    return recorder, told, monitor


def run(recorder: Recorder, monitor: Monitor, batches: int, every: int = 1) -> int:
    """End these batches, and return in how many the recorder had to gather peaks."""
    gathered = 0
    for batch in range(0, batches * every, every):
        gathered += recorder.gathers_peaks
        recorder.batch = batch
        monitor.end(batch)
    return gathered


def test_a_forecast_is_told_and_warned_of() -> None:
    """From magnitudes that grow by a bit in 40 batches; ever fewer batches are read for it."""
    recorder, told, monitor = monitored(forecasts=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gathered = run(recorder, monitor, 600)
    assert told.forecasts
    assert told.forecasts[0].module == "fc"
    assert len(told.forecasts) == len([one for one in caught if "overflow expected" in str(one.message)])
    assert 100 < gathered < 400


def test_without_forecasts_and_spikes_nothing_is_gathered() -> None:
    recorder, told, monitor = monitored(forecasts=False)
    assert not monitor.awaits_batches
    assert run(recorder, monitor, 100) == 0
    assert told.forecasts == []


def test_spikes_get_the_peaks_of_every_batch() -> None:
    """Also where forecasts read few."""
    recorder, _, monitor = monitored(forecasts=True)
    seen: list[int] = []
    monitor.follow(lambda batch, names, values: seen.append(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(recorder, monitor, 300) == 300
    assert seen == list(range(300))
    assert monitor.awaits_batches


def test_a_batch_that_ends_within_the_look_is_left_out() -> None:
    """As the garbage collector or a signal's handler may make it end there: it does not wait for ever."""
    recorder, _, monitor = monitored(forecasts=True)
    monitor.follow(lambda batch, names, values: monitor.end(batch + 1))
    run(recorder, monitor, 3)


def test_a_warning_of_a_spike_says_where_its_report_is() -> None:
    """In the first of its files, or in the Watch alone."""
    suspicion: Any = SimpleNamespace(suspects=lambda: [SimpleNamespace(growth="")])
    for files, words in (
        (("a/report.txt", "b"), "a/report.txt and Watch.spikes have the report"),
        ((), "s; Watch.spikes has"),
    ):
        report: Any = SimpleNamespace(summary="s", files=files)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Warnings(suspicion).on_spike(report)
        assert words in str(caught[0].message)
    assert torch.is_grad_enabled()
