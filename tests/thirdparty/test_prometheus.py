"""The sink `prometheus`: the real client, its registry read back."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.sinks import sink
from nanwatch.sinks.targets import PrometheusSink
from support.netcheck_ranks import free_port
from support.toys import Scale
from support.watching import watch

client: Any = pytest.importorskip("prometheus_client")


@pytest.fixture
def registry() -> Any:
    return client.CollectorRegistry()


def test_headroom_by_module_and_failures(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gauges are within the bound of modules; the counter goes on with a second watch."""
    monkeypatch.setattr(sink, "_MOST_CURVES", 2)
    for watched in (1, 2):
        model = nn.Sequential(Scale(), Scale(2.0), Scale(2.0**100))
        with watch(model, sinks=PrometheusSink(registry), log_every=1, on_nonfinite="record"):
            model(torch.ones(2))
            model[0].factor = float("inf")
            model(torch.ones(2))
        assert registry.get_sample_value("nanwatch_failures_total") == watched
    bits = {
        sample.labels["module"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "nanwatch_headroom_bits"
    }
    assert len(bits) == 2
    assert bits["2"] == registry.get_sample_value("nanwatch_least_headroom_bits") < 28
    assert registry.get_sample_value("nanwatch_spikes_total") == 0


def test_its_name_with_a_port_serves_the_registry_of_the_process() -> None:
    """From the first batch on, without code of the user; a second watch adds to it."""
    port, model = free_port(), nn.Sequential(Scale())
    for _ in range(2):
        with watch(model, sinks=f"prometheus:{port}", log_every=1):
            model(torch.ones(2))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        assert b'nanwatch_headroom_bits{module="0"}' in page.read()
    with pytest.raises(ValueError, match="takes a port, such as prometheus:9400, got 'x'"):
        watch(model, sinks="prometheus:x")
