"""Sinks that a target of `watch(sinks=)` means: numbers for TensorBoard, W&B or a function, and messages for whoever is
on call, in Prometheus, Slack or a webhook.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from .._version import __version__
from ..history.forecast import Forecast
from ..records.record import Frame, Least, by_module
from ..report import text
from ..report.events import ReplicaDifference, SpikeReport, UpdateFinding
from ..report.finding import Finding
from ..report.report import Report, annotation_of
from ..util.job import rank, rank_and_world_size
from ..util.messages import counts, needed, spell, visible, warn_user
from .sink import BatchSummary, Sink

# The first part of a tag is its group in TensorBoard and W&B: the whole model's numbers in one, modules in others.
TOTAL = "nanwatch"
HEADROOM, FORECAST = "nanwatch_headroom_bits", "nanwatch_forecast_batch"
FOLDER = "runs/nanwatch"  # below `runs`, where TensorBoard looks by default
ACCEPTED = (
    "a nanwatch.Sink, a SummaryWriter of TensorBoard, a pathlib.Path for TensorBoard, a run of wandb, a function of a"
    " dict and the number of the batch, a name such as 'tensorboard:runs/a'"
)
Values: TypeAlias = Mapping[str, float | str]
Facts: TypeAlias = dict[str, str | int]
_SECONDS = 10.0  # of one request
# Seconds between the attempts of one message.
_DELAYS = (1.0, 2.0, 4.0, 8.0)
# A message of the same event is held back for so many seconds, and counted in the next one.
_PAUSE = 60.0
# Seconds that the interpreter's end waits for a webhook.
_FAREWELL = 5.0


def sink_for(target: Any) -> Sink:
    """Return the sink of a target: itself, the log of an object, or what words such as "tensorboard:runs/a" name.

    Raises ImportError with the extra where its package is not installed.
    """
    if isinstance(target, Sink):
        return target
    if isinstance(target, str):
        name, _, words = target.partition(":")
        return factory_of(name)(*filter(None, [words]))
    return (log_for(target) or LogSink)(target)


def factory_of(name: str) -> Callable[..., Sink]:
    """Return what makes the sink of this name. Raises ValueError, with the names that there are, for another."""
    if name not in _FACTORIES:
        known = f"known are {', '.join(_FACTORIES)}; a folder for TensorBoard is tensorboard:FOLDER"
        raise ValueError(f"there is no sink {name!r}; {known}")
    return _FACTORIES[name]


def log_for(target: Any) -> Callable[..., LogSink] | None:
    """Return what makes the log of an object, None where it is none of those that are ACCEPTED."""

    def has(*methods: str) -> bool:
        return all(callable(getattr(target, method, None)) for method in methods)

    if isinstance(target, os.PathLike) or has("add_scalar", "add_text"):
        return TensorBoardSink
    if has("log", "define_metric"):  # a run; the module `wandb` stands for the run it began
        return WandbSink
    return LogSink if callable(target) and not isinstance(target, type) else None


# Numbers.


def _module_tag(name: str) -> str:
    return visible(name) or "(root)"


def batch_values(summary: BatchSummary) -> dict[str, float | str]:
    """Return the numbers and words of a finite batch."""
    values: dict[str, float | str] = {f"{TOTAL}/is_finite": 1.0}
    if summary.headroom:
        module, (bits, label, dtype) = next(iter(summary.headroom.items()))
        values[f"{TOTAL}/headroom_bits"] = bits
        values[f"{TOTAL}/headroom_module"] = visible(f"{_module_tag(module)} {label}, {dtype}")
    return values | {f"{HEADROOM}/{_module_tag(name)}": bits for name, bits in summary.curves.items()}


class LogSink(Sink):
    """Sink that logs numbers and words for each event: it calls a function with them, and with the batch.

    A tracker overrides `write`, and needs no more.
    """

    def __init__(self, function: Callable[[dict[str, float | str], int], object]) -> None:
        self._function = function

    def write(self, batch: int, values: Values) -> None:
        """Log these at the batch. All numbers are finite."""
        self._function(dict(values), batch)

    def flush(self) -> None:
        """Let what was logged outlive the process, if it does not anyhow."""

    def on_batch(self, summary: BatchSummary) -> None:
        """Log the headroom."""
        self.write(summary.batch, batch_values(summary))

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Log the batch that it expects, and its sentence."""
        tag = f"{FORECAST}/{_module_tag(forecast.module)}"
        self.write(batch, {tag: float(forecast.batch), f"{TOTAL}/forecast": str(forecast)})

    def on_update(self, finding: UpdateFinding) -> None:
        """Log its sentence."""
        self.write(max(finding.batch, 0), {f"{TOTAL}/update": str(finding)})

    def on_nonfinite(self, finding: Finding) -> None:
        """Log the batch at once: the next exception may end the process."""
        self.write(finding.batch, {f"{TOTAL}/is_finite": 0.0, f"{TOTAL}/finding": text.summary(finding)})
        self.flush()


class LeastHeadroom(Sink):
    """Sink that keeps the least headroom until it is taken. As in `by_module` an input counts only as a fault."""

    _least: Least | None = None

    def on_frame(self, frame: Frame) -> None:
        """Look at the records of a call."""
        for least in by_module([frame]).values():
            if least.bits < (inf if self._least is None else self._least.bits):
                self._least = least

    def take(self) -> Least | None:
        """Return the least since the last `take`, or None when there was none; then begin anew."""
        least, self._least = self._least, None
        return least


class TensorBoardSink(LogSink):
    """Log that writes with the user's writer, or with one of its own in a folder, made for the first entry.

    The step is the number of the batch. With several processes each has a folder of its own, as a trace has a file.
    """

    def __init__(self, target: Any = FOLDER) -> None:
        self._make: Callable[[], Any] | None = None
        self._writer: Any = None
        if isinstance(target, str | os.PathLike):
            who = 'watch(sinks="tensorboard:<folder>")'
            needed("tensorboard", who, "tensorboard")  # first, or torch would be said to be what is missing
            module = needed("torch.utils.tensorboard", who, "tensorboard")
            rank, world_size = rank_and_world_size()
            folder = Path(target).absolute()  # the run may change its folder
            folder = folder.with_name(f"{folder.name}-rank{rank}") if world_size > 1 else folder
            self._make = partial(module.SummaryWriter, folder)
        else:
            self._writer = target

    def write(self, batch: int, values: Values) -> None:
        """Add numbers and words, unless the user has closed the writer: it would begin a file then."""
        if self._writer is None and self._make is not None:
            self._writer = self._make()
        if getattr(self._writer, "all_writers", True) is not None:
            for tag, value in values.items():
                add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
                add(tag, value, batch)

    def flush(self) -> None:
        """Write what waits to the file."""
        if self._writer is not None and getattr(self._writer, "all_writers", True) is not None:
            self._writer.flush()

    def on_close(self) -> None:
        """Write what waits to the file, and close the writer if it is its own."""
        self.flush()
        if self._make is not None and self._writer is not None:
            self._writer.close()


class WandbSink(LogSink):
    """Log that adds entries to the user's run; the x axis of their charts is the number of the batch.

    A run has one step for all that is logged, and drops what comes with a lower step than it has reached. So the
    sink makes no step: its entry goes with the next `run.log` of the user's own. Between two of those the latest value
    of each number stays. The run has a process of its own, which outlives this one.
    """

    def __init__(self, target: Any = None) -> None:
        if isinstance(target, str):
            hint = "say that to wandb.init(), and pass what it returns"
            raise ValueError(f"the sink wandb takes no {target!r}; {hint}")
        self._target = needed("wandb", "watch(sinks=<run of wandb>)", "wandb") if target is None else target

    def write(self, batch: int, values: Values) -> None:
        """Log numbers and words."""
        self._run.log({f"{TOTAL}/batch": batch, **values}, commit=False)

    @cached_property
    def _run(self) -> Any:
        # A trainer may begin the run after its callbacks were made.
        run = self._target.run if isinstance(self._target, ModuleType) else self._target
        if run is None:
            raise ValueError("has no run: call wandb.init() before the first batch, or pass what it returns")
        run.define_metric(f"{TOTAL}/batch", hidden=True)
        for group in (TOTAL, HEADROOM, FORECAST):
            run.define_metric(f"{group}/*", step_metric=f"{TOTAL}/batch")
        return run


# Messages.


@dataclass(frozen=True, slots=True)
class Message:
    """Event in a sentence. `facts` are numbers and words such as the module, as far as the event has them."""

    event: str
    batch: int
    text: str
    facts: Facts = field(default_factory=dict)
    rank: int = field(default_factory=rank)
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)


class MessageSink(Sink):
    """Sink that sends a message for each event but batches. A system needs no more than `send`."""

    def send(self, message: Message) -> None:
        """Send it."""
        raise NotImplementedError

    def on_failure(self, report: Report) -> None:
        """Send the finding with its reason, and where the report was written."""
        if (finding := report.finding) is not None:
            facts: Facts = {"value": finding.value, "origin": finding.origin, "phase": finding.phase}
            self._report("failure", report, facts, finding.files)

    def on_spike(self, report: SpikeReport) -> None:
        """Send what jumped."""
        self._report("spike", report, {}, report.files)

    def _report(self, event: str, report: Report | SpikeReport, facts: Facts, files: tuple[str, ...]) -> None:
        if (annotation := annotation_of(report)) is not None:
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
        facts: Facts = {"tensor": difference.tensors[0], "step": difference.step}
        facts |= {"odd_rank": difference.ranks[0], "odd_host": difference.hosts[0]}
        self.send(Message("replica_difference", difference.batch, str(difference), facts))

    def on_update(self, finding: UpdateFinding) -> None:
        """Send its sentence, with its kind as the reason."""
        facts: Facts = {"module": finding.module, "reason": finding.kind, "step": finding.step}
        if finding.place is not None:
            facts["place"] = finding.place
        self.send(Message("update", finding.batch, str(finding), facts))


@cache
def _metrics(registry: Any) -> dict[str, Any]:
    """Return the metrics of a registry, which takes each name once: several watches add to the same."""
    client = needed("prometheus_client", "the sink prometheus", "prometheus")
    by_module = client.Gauge(HEADROOM, "least headroom in bits by module", ["module"], registry=registry)
    least = client.Gauge(f"{TOTAL}_least_headroom_bits", "least headroom in bits", registry=registry)
    metrics = {TOTAL: least, HEADROOM: by_module}
    for event in ("failure", "spike", "update", "forecast", "replica_difference"):
        name, words = f"{TOTAL}_{event}s", f"events {event} of nanwatch"
        metrics[event] = client.Counter(name, words, registry=registry)
    return metrics


@cache
def _serve(port: int | None) -> None:
    if port is not None:
        needed("prometheus_client", "the sink prometheus", "prometheus").start_http_server(port)


class PrometheusSink(MessageSink):
    """Metrics in a registry, by default the one that the servers of prometheus_client show.

    `target` is a registry, or a port on which to serve the default one: the first rank's, the next rank has the next.
    """

    def __init__(self, target: Any = None) -> None:
        self._port: int | None = None
        if isinstance(target, str):
            if not target.isdigit() or not 0 < int(target) < 65_536 - rank():
                raise ValueError(f"the sink prometheus takes a port, such as prometheus:9400, got {target!r}")
            self._port, target = int(target) + rank(), None
        default = needed("prometheus_client", "the sink prometheus", "prometheus").REGISTRY
        self._metrics = _metrics(default if target is None else target)

    def send(self, message: Message) -> None:
        """Count it."""
        _serve(self._port)
        self._metrics[message.event].inc()

    def on_batch(self, summary: BatchSummary) -> None:
        """Set the headroom of the model and of each module that has a curve."""
        _serve(self._port)
        for bits, _, _ in list(summary.headroom.values())[:1]:
            self._metrics[TOTAL].set(bits)
        for name, bits in summary.curves.items():
            self._metrics[HEADROOM].labels(_module_tag(name)).set(bits)


class WebhookSink(MessageSink):
    """Sink that posts to a URL, which is a secret and is never shown.

    Threads post: no step waits for them, and the interpreter's end waits at most 5 s. Five attempts a message, one
    message a minute for each kind of event. One warning says that a server takes nothing.
    """

    name = "webhook"

    def __init__(self, url: str = "") -> None:
        # An error of a URL with other characters would quote it.
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if not is_plain or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            example = f"{self.name}:https://example.com/hook"
            raise ValueError(f"the sink {self.name} takes a URL, such as {example}")
        self._url = url
        self._sent: dict[str, float] = {}
        self._num_held = Counter[str]()
        self._has_warned = False
        self._threads: list[threading.Thread] = []

    def body(self, message: Message) -> dict[str, Any]:
        """Return what is posted."""
        return {"source": "nanwatch", **asdict(message)}

    def send(self, message: Message) -> None:
        """Post it, unless one of its kind was posted just now."""
        event, now = message.event, time.monotonic()
        if now < self._sent.get(event, -_PAUSE) + _PAUSE:
            self._num_held[event] += 1
            return
        self._sent[event] = now
        if num_held := self._num_held.pop(event, 0):
            message = replace(message, text=f"({num_held} more since the last) {message.text}")
        body = json.dumps(self.body(message), allow_nan=False).encode()
        thread = threading.Thread(target=self._post, args=(body,), name=f"nanwatch {self.name}", daemon=True)
        if not self._threads:
            atexit.register(self.finish)
        self._threads = [thread, *(each for each in self._threads if each.is_alive())]
        thread.start()

    def finish(self) -> None:
        """Wait at most 5 s until all is posted."""
        until = time.monotonic() + _FAREWELL
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": f"nanwatch/{__version__}"}
        why = ""
        for delay in (0.0, *_DELAYS):
            time.sleep(delay)
            try:
                request = urllib.request.Request(self._url, body, headers)
                with urllib.request.urlopen(request, timeout=_SECONDS):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                why = f"HTTP status {error.code}"
                if error.code < 500 and error.code not in (408, 429):
                    break
            except Exception as error:  # no network, a name that is not found, a certificate
                why = spell(error)
        counts[f"a message of the sink {self.name} was not taken"] += 1
        if not self._has_warned:
            self._has_warned = True
            host = urlsplit(self._url).hostname
            message = f"{host} took no message of the sink {self.name}: {why}; the run goes on"
            warn_user(message, may_raise=False)


class SlackSink(WebhookSink):
    """Webhook of Slack, which shows at most 40,000 characters."""

    name = "slack"

    def body(self, message: Message) -> dict[str, Any]:
        """Return the sentence with the event, the rank and the host."""
        where = f"rank {message.rank} on {message.host}"
        return {"text": f"nanwatch {message.event}, {where}: {message.text}"[:40_000]}


_FACTORIES: dict[str, Callable[..., Sink]] = {
    "prometheus": PrometheusSink, "slack": SlackSink, "tensorboard": TensorBoardSink, "wandb": WandbSink,
    "webhook": WebhookSink,
}  # fmt: skip
