"""The sink `opentelemetry`: the real SDK with exporters in memory."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.sinks.opentelemetry import OpenTelemetrySink
from nanwatch.sinks.thread import _finish_all
from support.toys import Scale
from support.watching import watch

_needs = "needs OpenTelemetry: pip install opentelemetry-sdk"
metrics: Any = pytest.importorskip("opentelemetry.sdk.metrics", reason=_needs)
logs: Any = pytest.importorskip("opentelemetry.sdk._logs", reason=_needs)


def test_headroom_counts_and_an_event_for_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A second watch of the process goes on with the same instruments."""
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader, exporter = InMemoryMetricReader(), InMemoryLogRecordExporter()
    meters, loggers = metrics.MeterProvider([reader]), logs.LoggerProvider()
    loggers.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    model = nn.Sequential(Scale(2.0))
    for _ in range(2):
        sink = OpenTelemetrySink(meter_provider=meters, logger_provider=loggers)
        model[0].factor = 2.0
        with watch(model, sinks=sink, log_every=1, on_nonfinite="record"):
            model(torch.ones(2, dtype=torch.float16))
            model[0].factor = float("inf")
            model(torch.ones(2))
        _finish_all()
    points = {
        (metric.name, *map(str, point.attributes.values())): point.value
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert points["nanwatch.failures",] == 2
    assert (
        points["nanwatch.headroom", "0"]
        == points["nanwatch.headroom.least",]
        == pytest.approx(15.0, abs=0.01)
    )
    records = [one.log_record for one in exporter.get_finished_logs()]
    assert [(one.event_name, one.severity_text) for one in records] == [("nanwatch.failure", "ERROR")] * 2
    assert records[0].body.startswith("inf first seen in `output` of 0 (Scale) in batch 1")
    assert records[0].attributes["nanwatch.module"] == "0"
    assert records[0].attributes["nanwatch.batch"] == 1
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, not in the first batch."""
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(ImportError, match=r"pip install opentelemetry-sdk, .*'\.\[opentelemetry\]'"):
        watch(nn.Identity(), sinks="opentelemetry")
