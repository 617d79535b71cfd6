"""module_state: a re-run begins with the buffers of the batch's start, and a healthy batch copies only what changed."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import Tensor, nn

from nanwatch.diagnosis.batch_snapshot import (
    BatchSnapshot,
    BufferHistory,
    draws_outside_torch,
    no_second_run,
)
from support.examined import Does


class Counts(nn.Module):
    """Adds 1 to a small buffer and to a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(1 << 15))
        self.register_buffer("still", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.small += 1
        self.large += 1
        return x * self.small * self.still


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: x.flatten()[:3].tolist() for name, x in module.named_buffers() if x.ndim}


def test_a_second_run_begins_with_the_buffers_of_the_first() -> None:
    """A large buffer is as the first run left it."""
    model, history = Counts(), BufferHistory()
    for _ in range(3):
        x = torch.randn(4, 3)
        start = BatchSnapshot.capture(model, (x,), {}, buffers=history.note(model))
        before = values(model)
        output = model(x)
        left = values(model)
        with start.again() as call:
            seen = values(model)
            assert torch.equal(call(), output)
        assert values(model) == left
        assert seen == {**before, "large": left["large"]}


def test_a_healthy_batch_copies_what_was_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small buffers at first, then the one that changes. None of normalisations, and none in between."""
    model, history, copied = nn.Sequential(nn.BatchNorm1d(3), Counts()), BufferHistory(), []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda buffers: copied.extend(buffers) or cat(buffers))
    numbers = []
    for is_run in (True, True, False, False):
        copied.clear()
        history.note(model)
        numbers.append(len(copied))
        if is_run:
            model(torch.randn(4, 3))
    assert numbers == [2, 1, 1, 0]


def test_nothing_is_kept_alive() -> None:
    """Neither the model nor a buffer that was replaced."""
    model, history = Counts(), BufferHistory()
    history.note(model)
    alive = [weakref.ref(model.small), weakref.ref(model)]
    model.small = torch.zeros(3)
    assert alive[0]() is None
    del model
    gc.collect()
    assert alive[1]() is None


def test_generators_beside_torch_are_noted_where_code_of_the_program_mentions_them() -> None:
    def drawing(x: Tensor) -> Tensor:
        return x * random.random()

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return drawing(x)

    assert draws_outside_torch(Draws())
    assert not draws_outside_torch(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


def test_weights_that_other_processes_share_are_left_alone() -> None:
    model = Does(lambda linear, x: linear(x), nn.Linear(2, 2))
    assert not no_second_run(model)
    model.share_memory()
    assert no_second_run(model) == "its weights lie in memory that other processes share"
