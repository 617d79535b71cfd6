"""`nanwatch.twice`: sources of chance are named, repeatable trainings are called so, and nothing is left behind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nanwatch
from support.chance_sources import SOURCES, Source, training, wrong


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_source_of_chance_is_named(source: Source) -> None:
    """Module, cause and cure."""
    assert not list(wrong(source))


def batch_norm() -> Callable[..., Any]:
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten())
    return training(model, torch.optim.Adam(model.parameters()))


def scheduled_dropout() -> Callable[..., Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    inner = training(model, optimizer)

    def step(x: torch.Tensor) -> float:
        inner(x)
        scheduler.step()
        return scheduler.get_last_lr()[0]

    return step


class Trainer:
    """Training by a method, with augmentation by the global generators, hand-made parameters and a scaler."""

    def __init__(self) -> None:
        self.weight = torch.randn(4, 1, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.weight])

    def step(self, x: torch.Tensor) -> float:
        x = x * random.random() + float(np.random.rand())
        loss = (x @ self.weight).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


REPEATABLE = {make.__name__: make for make in (batch_norm, scheduled_dropout)} | {
    "trainer": lambda: Trainer().step
}


@pytest.mark.parametrize("make", REPEATABLE.values(), ids=REPEATABLE)
def test_a_repeatable_training_is_called_so(make: Callable[[], Callable[..., Any]]) -> None:
    """Also with random numbers, and with state of any kind: gradients, moments, statistics, averages, schedules."""
    step = make()
    batches = [torch.randn(3, 4) for _ in range(3)]
    step(batches[0])  # optimizers have a state before
    found = nanwatch.twice(step, batches=batches, times=3)
    assert found.equal, found.to_text()
    assert (found.batches, found.runs) == (3, 3)
    assert found.tensors > 3
    assert not found.remarks


def test_nothing_is_left_behind() -> None:
    """The run after it continues as it would without it; contents, tensors and random states are the same."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = training(model, optimizer)
    batch = torch.randn(3, 4)
    step(batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = {name: (one.grad, one.grad.clone()) for name, one in model.named_parameters()}
    tensors = [id(one) for one in (*model.parameters(), *model.buffers())]
    versions = [one._version for one in (*model.parameters(), *model.buffers())]
    moments = [id(one["exp_avg"]) for one in optimizer.state.values()]
    random_states = torch.get_rng_state(), random.getstate()
    assert nanwatch.twice(step, batches=[batch] * 2).equal
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), saved, rtol=0, atol=0)
    for name, one in model.named_parameters():
        assert one.grad is gradients[name][0]
        assert torch.equal(one.grad, gradients[name][1])
    assert [id(one) for one in (*model.parameters(), *model.buffers())] == tensors
    assert [one._version for one in (*model.parameters(), *model.buffers())] == versions
    assert [id(one["exp_avg"]) for one in optimizer.state.values()] == moments
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]


class Keeps(nn.Module):
    """Module that keeps a count, a list, a tensor and a generator in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.memory = 0, [], torch.zeros(4)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.extra = self.calls + 1, 1
        self.seen.append(0)
        self.memory += x.mean(0)
        noise = torch.rand(4, generator=self.generator)
        return x * self.calls * len(self.seen) + self.memory * noise


def test_attributes_of_modules_are_put_back() -> None:
    """The same objects with the same contents, before each run and afterwards; those that a run makes are gone."""
    model = Keeps()
    objects, state = (model.seen, model.memory, model.generator), model.generator.get_state()
    assert nanwatch.twice(lambda: model(torch.ones(3, 4))).equal
    assert model.calls == 0
    assert all(a is b for a, b in zip(objects, (model.seen, model.memory, model.generator), strict=True))
    assert model.seen == []
    assert not model.memory.any()
    assert torch.equal(model.generator.get_state(), state)
    assert not hasattr(model, "extra")


def test_an_error_of_the_step_is_the_callers() -> None:
    """State is put back, and no hook stays."""
    model = nn.Linear(2, 2)
    before = model.weight.clone()

    def step() -> None:
        with torch.no_grad():
            model.weight.zero_()
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        nanwatch.twice(step)
    assert torch.equal(model.weight, before)
    assert nanwatch.twice(lambda: model(torch.ones(1, 2))).equal


def test_two_causes_are_both_found() -> None:
    """Neither cure alone is enough."""
    model = nn.Sequential(SOURCES["clock"].part(), SOURCES["numpy_generator"].part())
    found = nanwatch.twice(lambda: model(torch.ones(3, 4)))
    assert found.tried[-1].outcome == "equal"
    assert "clocks" in found.tried[-1].change
    assert "manual_seed" in found.tried[-1].change


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"step": 3}, TypeError, "should be a function"),
        ({"step": lambda: None, "times": 1}, ValueError, "at least 2"),
        ({"step": lambda: None, "state": [3]}, TypeError, "modules, optimizers, tensors"),
    ],
)
def test_bad_use(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """The error says what came and what is accepted."""
    with pytest.raises(error, match=words):
        nanwatch.twice(**arguments)


def test_a_watched_model_is_refused() -> None:
    """The watch is before the calls."""
    model = nn.Linear(2, 2)
    with nanwatch.watch(model), pytest.raises(ValueError, match="root module is watched"):
        nanwatch.twice(lambda: model(torch.ones(1, 2)))
