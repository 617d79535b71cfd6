"""Messages for whoever is on call: events of a Watch in a sentence and facts, and the file of JSON lines."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any, TextIO

from ..history.forecast import Forecast
from ..report.annotation import annotation_of
from ..report.replica import ReplicaDifference
from ..report.report import Report
from ..report.skipped_step import SkippedStep
from ..report.spike import SpikeReport
from ..report.update_finding import UpdateFinding
from ..util.job import rank, rank_and_world_size
from .batch_summary import BatchSummary
from .logs import batch_entry, take_curves
from .sink import Sink

Facts = dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Message:
    """Event in a sentence. `facts` are numbers and words such as the module, as far as the event has them."""

    event: str
    batch: int
    text: str
    facts: Facts = field(default_factory=dict)
    rank: int = field(default_factory=rank)
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time)


class MessageSink(Sink):
    """Sink that sends a message for each event but batches. A system needs no more than `send`."""

    def send(self, message: Message) -> None:
        """Send it."""
        raise NotImplementedError

    def on_failure(self, report: Report) -> None:
        """Send the finding with its reason, and where the report was written."""
        finding = report.finding
        facts: Facts = {}
        if finding is not None:
            facts = {"value": finding.value, "origin": finding.origin, "phase": finding.phase}
        self._report("failure", report, facts, () if finding is None else finding.files)

    def on_spike(self, report: SpikeReport) -> None:
        """Send what jumped."""
        self._report("spike", report, {}, report.files)

    def _report(self, event: str, report: Report | SpikeReport, facts: Facts, files: tuple[str, ...]) -> None:
        annotation = annotation_of(report)
        if annotation is None:
            return
        facts = {"module": annotation.module, "reason": annotation.rule, **facts}
        if annotation.place is not None:
            facts["place"] = str(annotation.place)
        if files:
            facts["folder"] = str(Path(files[0]).parent)
        self.send(Message(event, report.batch or 0, annotation.text, facts, report.rank))

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Send its sentence."""
        facts: Facts = {"module": forecast.module, "expected_batch": forecast.batch}
        self.send(Message("forecast", batch, str(forecast), facts))

    def on_replica_difference(self, difference: ReplicaDifference) -> None:
        """Send its sentence, with the first tensor and rank."""
        facts: Facts = {
            "tensor": difference.tensors[0],
            "step": difference.step,
            "odd_rank": difference.ranks[0],
            "odd_host": difference.hosts[0],
        }
        self.send(Message("replica_difference", difference.batch, str(difference), facts))

    def on_update(self, finding: UpdateFinding) -> None:
        """Send its sentence, with its kind as the reason."""
        facts: Facts = {"module": finding.module, "reason": finding.kind, "step": finding.step}
        if finding.place is not None:
            facts["place"] = finding.place
        self.send(Message("update", finding.batch, str(finding), facts))

    def on_skipped_step(self, step: SkippedStep) -> None:
        """Send its note."""
        self.send(Message("skipped_step", step.batch, str(step), {"module": step.finding.module}))


class JsonLinesSink(MessageSink):
    """Messages and headroom as lines of a file, each a JSON document. Each process has a file of its own."""

    in_thread = True

    def __init__(self, path: str) -> None:
        where, (number, world_size) = Path(path).absolute(), rank_and_world_size()
        self._path = where.with_name(f"{where.stem}-rank{number}{where.suffix}") if world_size > 1 else where
        self._file: TextIO | None = None
        self._modules: dict[str, None] = {}

    def send(self, message: Message) -> None:
        """Write it."""
        self._write(asdict(message))

    def on_batch(self, summary: BatchSummary) -> None:
        """Write the numbers that logs get."""
        entry = batch_entry(summary, take_curves(self._modules, summary))
        self._write({"event": "batch", "batch": entry.batch, "time": time(), **entry.scalars, **entry.texts})

    def _write(self, document: dict[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(document, allow_nan=False) + "\n")
        self._file.flush()

    def on_close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
