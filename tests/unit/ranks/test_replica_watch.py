"""The part of a Watch that takes fingerprints between two batches."""

from __future__ import annotations

import weakref

import pytest
import torch

from nanwatch.ranks.replica_watch import ReplicaWatch
from nanwatch.report.events import ReplicaDifference


def test_a_watch_outside_a_job_says_so_once_and_lets_go(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Nothing is compared, and the model may go."""
    model = torch.nn.Linear(2, 2)
    told: list[ReplicaDifference] = []
    watch = ReplicaWatch(model, 1, 5.0, told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(3):
        watch.batch_started(batch)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    watch.remove()
    (warned,) = recwarn
    assert "compares no replicas so far, as torch.distributed is not initialized" in str(warned.message)
    assert told == []
    gone = weakref.ref(model)
    del model, optimizer
    assert gone() is None
