"""Hooks on the steps of all optimizers: they may come and go while a step goes through them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from nanwatch.instrumentation.global_hooks import GlobalHooks, after_steps, before_steps, children
from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import watch
from support.gradient_models import Sick
from support.toys import in_threads, mlp


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of its weights."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_torch_has_one_of_each_kind_for_good() -> None:
    """However many watches there are or were; ours come and go with theirs."""
    with watch(mlp(), gradients=True):
        torch_has = (
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
        )
        ours = len(before_steps), len(after_steps), len(children)
        assert all(ours)
        with watch(mlp(), gradients=True):
            assert torch_has == (
                len(torch_optimizer._global_optimizer_pre_hooks),
                len(torch_optimizer._global_optimizer_post_hooks),
            )
            assert (len(before_steps), len(after_steps), len(children)) > ours
    gc.collect()
    assert (len(before_steps), len(after_steps), len(children)) < ours


def test_the_documentation_names_all_registries_that_a_watch_uses() -> None:
    """Before and after steps, and when a module gets a child; no registry of forwards or backwards."""
    with watch(mlp(), gradients=True):
        used = {
            name
            for registries in (nn.modules.module, torch_optimizer)
            for name, hooks in vars(registries).items()
            if name.startswith("_global_") and isinstance(hooks, dict)
            for hook in hooks.values()
            if isinstance(getattr(hook, "__self__", None), GlobalHooks)
        }
    assert used == {
        "_global_optimizer_pre_hooks",
        "_global_optimizer_post_hooks",
        "_global_module_registration_hooks",
    }


def test_a_watch_may_be_stopped_by_what_its_own_step_tells() -> None:
    """The callback of a failing step stops it: the step goes on, past the hooks of other watches."""
    model = nn.Sequential(Sick())
    told = []

    def stop(report: Any) -> None:
        told.append(report.finding.phase)
        w.stop()

    w = watch(model, gradients=True, on_nonfinite=stop)
    with watch(mlp(), gradients=True):
        optimizer = sgd(model)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    assert told == ["backward"]
    assert model[0].weight.isnan().any() or model[0].weight.isinf().any()


def test_a_watch_that_is_collected_in_a_step_harms_nothing() -> None:
    """The garbage collector runs when it likes: here in the middle of another's hooks."""
    kept: list[Any] = [watch(mlp(), gradients=True)]

    def collect(*_: Any) -> None:
        kept.clear()
        gc.collect()

    handle = torch_optimizer.register_optimizer_step_pre_hook(collect)
    model = mlp()
    with watch(model, gradients=True):
        optimizer = sgd(model)
        model(torch.ones(2, 3)).sum().backward()
        try:
            optimizer.step()
        finally:
            handle.remove()
    assert not kept


@pytest.mark.usefixtures("switching")
def test_watches_begin_and_end_while_other_threads_step() -> None:
    """No step fails for it, and every one is made."""
    over = threading.Event()
    steps = [0, 0]

    def train(number: int) -> None:
        if number == 2:
            while not over.is_set():
                watch(nn.Linear(2, 2), gradients=True).stop()
            return
        model = mlp()
        optimizer = sgd(model)
        try:
            while not over.is_set():
                optimizer.step()
                steps[number] += 1
                if min(steps) >= 50:
                    over.set()
        finally:
            over.set()

    errors: list[Any] = []
    before, threading.excepthook = threading.excepthook, errors.append
    try:
        in_threads(3, train)
    finally:
        threading.excepthook = before
    assert not [error.exc_value for error in errors]
    assert min(steps) >= 50


def test_what_a_hook_returns_the_next_one_gets() -> None:
    """A hook may replace the arguments of the step, as in PyTorch; None changes nothing."""
    registered: list[Any] = []
    hooks = GlobalHooks(registered.append)
    seen: list[Any] = []
    assert not registered
    first = hooks.add(lambda subject, args, kwargs: seen.append((args, kwargs)))
    (call,) = registered
    assert call("it", (1,), {}) is None
    second = hooks.add(lambda subject, args, kwargs: ((*args, 2), kwargs))
    third = hooks.add(lambda subject, args, kwargs: seen.append((subject, args, kwargs)))
    assert call("it", (1,), {}) == ((1, 2), {})
    assert seen == [((1,), {}), ((1,), {}), ("it", (1, 2), {})]
    assert len(registered) == 1
    for one in (first, second, third, first):
        one.remove()
    assert len(hooks) == 0
    assert call("it", (1,), {}) is None


def test_what_a_hook_raises_the_step_raises() -> None:
    """Also with other watches behind it."""
    model = nn.Sequential(Sick())
    with watch(model, gradients=True), watch(mlp(), gradients=True):
        optimizer = sgd(model)
        model(torch.ones(3)).sum().backward()
        with pytest.raises(NonFiniteError):
            optimizer.step()
