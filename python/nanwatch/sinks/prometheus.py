"""Prometheus: counters of events and gauges of headroom in a registry of prometheus_client."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from ..util.imports import needed
from ..util.job import rank
from .batch_summary import BatchSummary
from .logs import HEADROOM, TOTAL
from .messages import EVENTS, Message, MessageSink, headroom_of

LEAST = f"{TOTAL}_least_headroom_bits"
_OWN = {
    f"{TOTAL}_own_seconds": "time that nanwatch took of a batch",
    f"{TOTAL}_own_share": "that time as a share of the time between two batches",
}


class PrometheusSink(MessageSink):
    """Metrics in a registry, by default the one that the servers of prometheus_client show.

    `target` is a registry, or a port on which to serve the default one: the first rank's, the next rank has the next.
    Several watches add to the same metrics, because a registry takes each name once.
    """

    _OF: ClassVar[WeakKeyDictionary[Any, dict[str, Any]]] = WeakKeyDictionary()
    _served: ClassVar[set[int]] = set()

    def __init__(self, target: Any = None) -> None:
        self._client = needed("prometheus_client", "the sink prometheus", "prometheus")
        self._port: int | None = None
        registry = self._client.REGISTRY
        if isinstance(target, str):
            if not target.isdigit() or not 0 < int(target) < 65_536 - rank():
                raise ValueError(f"the sink prometheus takes a port, such as prometheus:9400, got {target!r}")
            self._port = int(target) + rank()
        elif target is not None:
            registry = target
        if registry not in self._OF:
            self._OF[registry] = self._made(registry)
        self._metrics = self._OF[registry]
        self._modules: dict[str, None] = {}

    def _made(self, registry: Any) -> dict[str, Any]:
        gauge, counter, bits = self._client.Gauge, self._client.Counter, "least headroom in bits"
        return {
            LEAST: gauge(LEAST, f"{bits} of all modules", registry=registry),
            HEADROOM: gauge(HEADROOM, f"{bits} by module", ["module"], registry=registry),
            **{name: gauge(name, text, registry=registry) for name, text in _OWN.items()},
            **{
                name: counter(f"{TOTAL}_{name}s", text, registry=registry)
                for name, (_, text) in EVENTS.items()
            },
        }

    def _serve(self) -> None:
        if self._port is not None and self._port not in self._served:
            self._served.add(self._port)
            self._client.start_http_server(self._port)

    def send(self, message: Message) -> None:
        """Count it."""
        self._serve()
        self._metrics[message.event].inc()

    def on_batch(self, summary: BatchSummary) -> None:
        """Set the headroom of the model and of each module that has a curve, and nanwatch's own time."""
        self._serve()
        for name, number in zip(_OWN, summary.own_time or (), strict=False):
            self._metrics[name].set(number)
        for name, bits in headroom_of(summary, self._modules).items():
            (self._metrics[HEADROOM].labels(name) if name else self._metrics[LEAST]).set(bits)
