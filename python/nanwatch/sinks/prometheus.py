"""Prometheus: counters of events and gauges of headroom in a registry of prometheus_client."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from ..util.imports import needed
from ..util.job import rank
from .batch_summary import BatchSummary
from .logs import HEADROOM, TOTAL, spell_module, take_curves
from .messages import Message, MessageSink

LEAST = f"{TOTAL}_least_headroom_bits"
# Each event with the help of its counter.
_EVENTS = {
    "failure": "failures: values that were not finite",
    "spike": "spikes of the loss or the gradients",
    "update": "findings about the optimizer's steps",
    "forecast": "forecasts of an overflow",
    "replica_difference": "differences between replicas",
    "skipped_step": "optimizer steps that a GradScaler skipped",
}


class PrometheusSink(MessageSink):
    """Metrics in a registry, by default the one that the servers of prometheus_client show.

    `target` is a registry, or a port on which to serve the default one: the first rank's, the next rank has the next.
    Several watches add to the same metrics, because a registry takes each name once.
    """

    _METRICS: ClassVar[WeakKeyDictionary[Any, dict[str, Any]]] = WeakKeyDictionary()
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
        if registry not in self._METRICS:
            self._METRICS[registry] = self._made(registry)
        self._metrics = self._METRICS[registry]
        self._modules: dict[str, None] = {}

    def _made(self, registry: Any) -> dict[str, Any]:
        gauge, counter, bits = self._client.Gauge, self._client.Counter, "least headroom in bits"
        counters = {
            event: counter(f"{TOTAL}_{event}s", words, registry=registry) for event, words in _EVENTS.items()
        }
        least = gauge(LEAST, f"{bits} of all modules", registry=registry)
        return {
            **counters,
            LEAST: least,
            HEADROOM: gauge(HEADROOM, f"{bits} by module", ["module"], registry=registry),
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
        """Set the headroom of the model and of each module that has a curve."""
        self._serve()
        headroom = summary.headroom
        if headroom:
            self._metrics[LEAST].set(next(iter(headroom.values()))[0])
        for name in take_curves(self._modules, summary):
            if name in headroom:
                self._metrics[HEADROOM].labels(spell_module(name)).set(headroom[name][0])
