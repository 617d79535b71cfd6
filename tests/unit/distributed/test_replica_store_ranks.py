"""Many ranks before one store, simulated by events with the real protocols."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from support.paths import BENCHMARKS


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_rank_events")


@pytest.mark.parametrize("way", ["odd", "lost", "slow", "restart"])
def test_every_rank_names_the_odd_one(events: Any, way: str) -> None:
    """Also those that come late, or after a restart; lost ones hold the others up for the timeout at most."""
    played = events.replicas(64, 32, way)
    living = 32  # the lost ones are in the other group
    assert (played.told, played.right) == (living, living)
    assert played.seconds < 40
    alone = events.replicas(64, 64, way)
    assert alone.told == alone.right == (64 - events.LOST if way == "lost" else 64)


def test_a_healthy_check_is_four_messages_a_rank(events: Any) -> None:
    """And one key a group."""
    played = events.replicas(64, 16, "healthy")
    assert (played.messages, played.keys, played.told) == (4 * 64, 4, 0)


@pytest.mark.parametrize("way", ["well", "lost", "slow", "restart"])
def test_the_first_failure_is_agreed_on(events: Any, way: str) -> None:
    """By all that live."""
    played = events.first_failure(64, way)
    assert played.right == played.told == (64 - events.LOST if way == "lost" else 64)
