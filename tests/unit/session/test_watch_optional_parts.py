"""Parts of a Watch: which option makes which, and that each follows the batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.recording.events import WatchPart
from nanwatch.session import watch as watch_module
from support.watching import watch


@pytest.mark.parametrize(("option", "kind"), [("replicas", "ReplicaWatch"), ("audit", "UpdateAudit")])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_option_makes_its_part(option: str, kind: str, enabled: bool, monkeypatch: Any) -> None:
    """And nothing does where the watch is switched off."""
    made: list[WatchPart] = []

    def keep(*args: Any) -> list[WatchPart]:
        made.extend(real(*args))
        return made

    real = watch_module.optional_parts
    monkeypatch.setattr(watch_module, "optional_parts", keep)
    options: dict[str, Any] = {option: 2}
    watch(nn.Linear(2, 2), enabled=enabled, **options).stop()
    assert [type(part).__name__ for part in made] == [kind] * enabled


def test_a_part_gets_batches_with_their_module_and_is_removed_before_it_sums_up(monkeypatch: Any) -> None:
    """In the order of the run."""
    told: list[object] = []

    class Part(WatchPart):
        def batch_started(self, batch: int, module: nn.Module | None, args: tuple[Any, ...]) -> None:
            told.append((batch, module))

        def remove(self) -> None:
            told.append("removed")

        def sum_up(self) -> None:
            told.append("summed up")

    monkeypatch.setattr(watch_module, "optional_parts", lambda *_: [Part()])
    model = nn.Linear(2, 2)
    with watch(model):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert told == [(0, model), (1, model), "removed", "summed up"]
