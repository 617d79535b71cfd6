"""BatchSnapshot: a second call is as the first was, and afterwards everything is as it was before it."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanwatch.diagnosis.batch_snapshot import BatchSnapshot, BufferHistory, draws_outside_torch, no_second_run
from support.examined import snapshot_of
from support.spy import Spy
from support.toys import Does


def started(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> BatchSnapshot:
    return snapshot_of(Does(forward), args, kwargs, draws=True)


def rerun(start: BatchSnapshot) -> Any:
    with start.again() as call:
        return call()


# The second call is as the first


def test_a_lock_of_the_class_is_not_waited_for() -> None:
    """Servers hold one in `__call__`, which the failed call has not left."""

    class Locked(Does):
        lock = threading.Lock()

        def __call__(self, *args: Any) -> Any:
            with self.lock:
                return super().__call__(*args)

    model = Locked(lambda x: x + 1)
    with model.lock:
        assert rerun(snapshot_of(model, (torch.ones(1),), {})) == 2


def test_the_same_autocast() -> None:
    """Autocast is what it was at the start, with its dtype, inside and outside of another."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.float16):
        start = started(torch.mm, x, x)
    assert rerun(start).dtype is torch.float16
    plain = started(torch.mm, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert rerun(plain).dtype is torch.float32
        assert rerun(start).dtype is torch.float16
        assert (x @ x).dtype is torch.bfloat16
    # A weight cast without a graph in the second call is not in the cache of the user's own call.
    linear = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        rerun(snapshot_of(linear, (x,), {}))
        linear(x).sum().backward()
    assert linear.weight.grad is not None


@pytest.mark.parametrize("inference", [False, True])
def test_inference_mode_and_no_graph(inference: bool) -> None:
    """In inference mode where the first was. A forward that writes into its arguments, at any depth, writes once."""
    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode(inference):
        start = started(lambda x: x * 2, x)
        y, z = torch.ones(2), torch.ones(2)
        rerun(started(lambda y, more: (y.mul_(2), more["z"].mul_(2)), y, {"z": z}))
    assert (y.tolist(), z.tolist()) == ([1, 1], [1, 1])
    y = rerun(start)
    assert (y.is_inference(), y.requires_grad) == (inference, False)


@pytest.mark.compile
def test_compiled_modules_run_eagerly() -> None:
    """A compiled module is re-run in eager mode."""
    compiling = Spy()

    @torch.compile(backend="eager")
    def part(x: Tensor) -> Tensor:
        compiling.add(torch.compiler.is_compiling())
        return x + 1

    assert rerun(started(part, torch.ones(2))).tolist() == [2, 2]
    assert compiling.values == [False]


def test_a_transformer_layer_calls_its_parts() -> None:
    """Where the first call built a graph, PyTorch's shortcut for calls without one is not taken."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    # Not a hook: hooks close the shortcut themselves.
    layer.linear1.forward = called = mock.Mock(wraps=layer.linear1.forward)
    x = torch.randn(1, 3, 8)
    rerun(snapshot_of(layer, (x,), None))
    assert called.call_count == 1
    with torch.no_grad():
        start = snapshot_of(layer, (x,), None)
    rerun(start)
    assert called.call_count == 1
    assert torch.backends.mha.get_fastpath_enabled()


# Nothing is left behind


def drawn() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]


@pytest.mark.parametrize("fail", [False, True])
def test_random_states_buffers_and_flags_are_put_back(fail: bool) -> None:
    """Buffers written in place, past the version counter, or replaced: the same tensor, value and version as before.

    The random numbers of the call are those of the start. All of it also when the call raises.
    """
    seen = Spy()

    def forward(norm: nn.Module, x: Tensor) -> Tensor:
        seen.add(drawn())
        model.written += 1
        model.hidden.numpy()[0] = 9
        model.replaced = torch.zeros(5)
        norm(x)
        norm.eval()
        if fail:
            raise RuntimeError("on purpose")
        return x

    model: Any = Does(forward, norm := nn.BatchNorm1d(3))
    for name in ("written", "hidden", "replaced"):
        model.register_buffer(name, torch.ones(2))
    model.register_buffer("nothing", None)
    model.register_buffer("shared", torch.arange(3).expand(4, 3))

    def state() -> list[Any]:
        buffers = sorted(dict(model.named_buffers()).items())
        states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
        held = [(name, id(x), x.tolist(), x._version) for name, x in buffers]
        return [*held, model.nothing, norm.training, *states]

    start = snapshot_of(model, (torch.randn(4, 3),), None, draws=True)
    first, before = drawn(), state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose") if fail else contextlib.nullcontext():
            rerun(start)
    assert (seen.values, state()) == ([first, first], before)


def test_a_backward_under_way_is_not_disturbed() -> None:
    """Buffers and inputs that the user's own call has saved for its backward are, to autograd, unchanged."""

    model: Any = Does(lambda x: x.add_(model.factor.mul_(2)))
    model.register_buffer("factor", torch.ones(3))
    x = (leaf := torch.ones(3, requires_grad=True)) * 1
    product = leaf * model.factor * x
    rerun(snapshot_of(model, (x,), None))
    product.sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


# Buffers, and other random numbers


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
        start = snapshot_of(model, (x,), {}, history.note(model))
        before = values(model)
        output = model(x)
        left = values(model)
        with start.again() as call:
            seen = values(model)
            assert torch.equal(call(), output)
        assert values(model) == left
        assert seen == {**before, "large": left["large"]}


def test_a_healthy_batch_copies_what_was_written_to() -> None:
    """Two small buffers at first, then the one that changes. None of normalisations, and none in between."""
    model, history = nn.Sequential(nn.BatchNorm1d(3), Counts()), BufferHistory()
    copies: set[int] = set()
    kept, numbers = [], []
    for is_run in (True, True, False, False):
        kept += [value for *_, value in history.note(model).values() if value is not None]
        numbers.append(len({id(x) for x in kept} - copies))
        copies |= {id(x) for x in kept}
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
    """The module of `Counts` does, in `drawn`."""
    assert draws_outside_torch(Counts())
    assert not draws_outside_torch(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


def test_weights_that_other_processes_share_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    assert not no_second_run(model)
    model.share_memory()
    assert no_second_run(model) == "its weights lie in memory that other processes share"
