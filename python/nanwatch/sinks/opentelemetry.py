"""OpenTelemetry: counters, gauges of headroom, and an event for each failure, spike and forecast."""

from __future__ import annotations

from typing import Any

from .._version import __version__
from ..util.imports import needed
from .batch_summary import BatchSummary
from .messages import EVENTS, Message, MessageSink, headroom_of

_WHO, _EXTRA = "the sink opentelemetry", "opentelemetry"


class OpenTelemetrySink(MessageSink):
    """Metrics and events of the providers that the process has set, by a script or by `opentelemetry-instrument`."""

    in_thread = True

    def __init__(self, *, meter_provider: Any = None, logger_provider: Any = None) -> None:
        metrics = needed("opentelemetry.metrics", _WHO, _EXTRA)
        self._logs = needed("opentelemetry._logs", _WHO, _EXTRA)
        meter = metrics.get_meter("nanwatch", __version__, meter_provider)
        self._log = self._logs.get_logger("nanwatch", __version__, logger_provider)
        bits = "least headroom in bits"
        self._least = meter.create_gauge("nanwatch.headroom.least", "bit", f"{bits} of all modules")
        self._headroom = meter.create_gauge("nanwatch.headroom", "bit", f"{bits} by module")
        took = "time that nanwatch took of a batch"
        self._own = (
            meter.create_gauge("nanwatch.own_time", "s", took),
            meter.create_gauge("nanwatch.own_share", "1", f"{took}, as a share of that between two batches"),
        )
        self._counters = {
            name: meter.create_counter(f"nanwatch.{name}s", "1", text) for name, (_, text) in EVENTS.items()
        }
        self._modules: dict[str, None] = {}

    def send(self, message: Message) -> None:
        """Count it, and emit an event with its facts."""
        facts = {f"nanwatch.{name}": value for name, value in message.facts.items()}
        self._counters[message.event].add(1)
        severity = {20: "INFO", 30: "WARN", 40: "ERROR"}[message.level]
        record = self._logs.LogRecord(
            timestamp=int(message.time * 1e9),
            severity_text=severity,
            severity_number=self._logs.SeverityNumber[severity],
            body=message.text,
            attributes={**facts, "nanwatch.batch": message.batch, "nanwatch.rank": message.rank},
            event_name=f"nanwatch.{message.event}",
        )
        self._log.emit(record)

    def on_batch(self, summary: BatchSummary) -> None:
        """Set the headroom of the model and of each module that has a curve, and nanwatch's own time."""
        for gauge, number in zip(self._own, summary.own_time or (), strict=False):
            gauge.set(number)
        for name, bits in headroom_of(summary, self._modules).items():
            if name:
                self._headroom.set(bits, {"module": name})
            else:
                self._least.set(bits)
