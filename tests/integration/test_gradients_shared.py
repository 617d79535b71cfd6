"""A gradient that comes to several places of the graph is read once."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.architectures import ARCHITECTURES, built, inputs_of
from support.forks import SIDE, Fork, Hook, batch, doubles, fork_backward, gained, range_of, ranges
from support.heap import assert_no_growth
from support.hooked_gradients import HookedGradients, Seen, new_frames, seen
from support.recorders import RECORDERS, WITH_DEVICE, available, needs_native, watched
from support.toys import Scale
from support.training import loss_of


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_what_a_sum_hands_on_is_read_once(recorder: str) -> None:
    """The gradient of a sum is that of both its terms: three records, one reading, and every weight's own."""
    model, gradient = Fork(), torch.randn(SIDE, SIDE)
    w, gain = fork_backward(recorder, model, gradient)
    assert ranges(w) == dict.fromkeys(("first", "second", ""), range_of(gradient))
    assert gain["tensors"] == 3 + 4
    assert gain["tensors_read"] == 1 + 4
    assert gain["cache_hits"] == 2
    if recorder != "python":
        assert gain["bytes_read"] == 4 * (SIDE * SIDE + 2 * (SIDE * SIDE + SIDE))
        assert gain["stale_hits"] == 0


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_shortcut_is_known_after_the_branch(recorder: str) -> None:
    """A branch of seven gradients lies between the two places where that of the sum comes."""

    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shortcut = Scale(0.5)
            self.branch = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(8)))

        def forward(self, x: Tensor) -> Tensor:
            shortcut = self.shortcut(x)
            return self.branch(x) + shortcut

    model = Bottleneck()
    with watched(model, recorder, gradients=True, weights=False) as w:
        y = model(batch().requires_grad_())
        gain = gained(w, lambda: y.backward(torch.randn(SIDE, SIDE)))
    # Each layer's output, and the input, which both had.
    assert gain["tensors_read"] == 8 + 1


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_counts_come_along(recorder: str) -> None:
    """With counts each record has its own row, under its label, though the tensor was counted once."""
    gradient = torch.randn(SIDE, SIDE)
    gradient[0, :5] = 0
    w, gain = fork_backward(recorder, Fork(), gradient, counts=True)
    assert gain["tensors_read"] == 5
    records = [r for f in w.frames if f.phase == "backward" for r in f.records if r.label == "output.grad"]
    assert [r.health.num_zero for r in records if r.health is not None] == [5, 5, 5]


@needs_native
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_known_is_what_a_reading_would_give(name: str) -> None:
    """Training steps of real architectures: each gradient that was not read again is, and none is otherwise."""
    model = built(name)
    with watched(model, "native", gradients=True) as w:
        for step in range(2):
            loss = loss_of(model(**inputs_of(name, step)))
            gain = gained(w, loss.backward)
            assert gain["cache_hits"] + gain["tensors_read"] == gain["tensors"]
            assert gain["cache_hits"] > 0
            assert gain["stale_hits"] == 0


# Random sums


class Term(nn.Module):
    """One operation on two tensors; of some the two have the gradient of the result."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kind = rng.choice(["sum", "sum", "sum in place", "alias", "scale", "linear", "checkpointed"])
        self.factor = rng.choice([0.5, 3.0])
        self.weight = nn.Parameter(torch.randn(4, 4)) if self.kind == "linear" else None
        self.part = Term(rng) if rng.random() < 0.3 else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.part is not None:
            x = self.part(x, y)
        if self.kind == "checkpointed":
            return checkpoint(lambda a, b: (a * self.factor).tanh() + b, x, y, use_reentrant=False)
        if self.kind == "linear":
            return x @ self.weight + y
        if self.kind == "sum in place":
            return (x * 1.5).add_(y)
        return {"sum": x + y, "alias": x.view(4, 2).view(2, 4), "scale": x * self.factor}[self.kind]


class Sums(nn.Module):
    """Some terms on what was made before; with `treated`, hooks write into some gradients or replace them."""

    def __init__(self, seed: int, treated: bool) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed % 2**31)
        self.seed, self.treated = seed, treated
        self.terms = nn.ModuleList(Term(rng) for _ in range(rng.randint(2, 9)))

    def forward(self, x: Tensor) -> Tensor:
        rng = random.Random(self.seed + 1)
        pool = [x * 2, x * 0.5]
        for term in self.terms:
            pool.append(term(rng.choice(pool), rng.choice(pool)))
            hook = rng.choice([None, doubles, lambda g: g * 3])
            if self.treated and hook is not None:
                pool[-1].register_hook(hook)
        return pool[-1] + pool[-2]


class Counted(HookedGradients):
    """The oracle, which reads everything, and counts what it need not: by tensor and version, weakly held."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.read = 0
        self.latest: deque[tuple[tuple[int, int], object]] = deque(maxlen=16)

    def _noter(self, call: Any, part: str, label: str) -> Hook:
        note = super()._noter(call, part, label)

        def counted(g: Tensor | None) -> None:
            reached = any(one.call is call and one.part == "output" for one in self._arrivals)
            if g is not None and (part != "input" or reached) and self._is_new(g):
                self.read += 1
                self.latest.append(((g._cdata, g._version), torch._C._WeakTensorRef(g)))  # type: ignore[attr-defined]
            note(g)

        return counted

    def _weight_noter(self, module: str, label: str) -> Hook:
        note = super()._weight_noter(module, label)

        def counted(g: Tensor | None) -> None:
            self.read += g is not None and self._is_new(g)
            note(g)

        return counted

    def _is_new(self, g: Tensor) -> bool:
        return all(one != (g._cdata, g._version) for one, _ in self.latest)


def sums_loss(model: nn.Module) -> Tensor:
    """A number made of some sums of one leaf."""
    return model(torch.arange(8.0).reshape(2, 4).requires_grad_()).square().sum()


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), treated=st.booleans())
def test_the_frames_are_those_of_plain_hooks(seed: int, treated: bool) -> None:
    """Sums, in-place sums, views, hooks that write: each record is what a hook sees there, each tensor read once."""
    hooked = Sums(seed, treated)
    oracle = Counted(hooked)
    sums_loss(hooked).backward()
    expected = oracle.take()
    for recorder in available():
        model = Sums(seed, treated)
        with watched(model, recorder, gradients=True, max_frames=10_000) as w:
            loss = sums_loss(model)
            gain = gained(w, loss.backward)
            assert seen(w.frames) == expected
        assert gain["tensors"] == sum(len(rows) for _, rows in expected)
        assert gain["tensors_read"] == oracle.read
        assert gain.get("stale_hits", 0) == 0


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_several_backwards_of_a_graph(seed: int) -> None:
    """retain_graph, then a double backward: each has the frames that plain hooks see."""
    found = []
    for recorder in ["oracle", *available()]:
        model = Sums(seed, treated=False)
        x = torch.arange(8.0).reshape(2, 4).requires_grad_()
        if recorder == "oracle":
            oracle = HookedGradients(model)
            found.append(several(model, x, lambda last: oracle.take(again=not last)))  # noqa: B023
        else:
            with watched(model, recorder, gradients=True, max_frames=10_000) as w:
                new = new_frames(w)
                found.append(several(model, x, lambda last: new()))  # noqa: B023
                assert w.counters.get("stale_hits", 0) == 0
    assert all(one == found[0] for one in found)


def several(model: nn.Module, x: Tensor, take: Callable[[bool], list[Seen]]) -> list[list[Seen]]:
    """Return the gradients that came in each of four backwards of one forward."""
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    found = [take(False)]
    loss.backward(retain_graph=True)
    found.append(take(False))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    found.append(take(False))
    gradient.square().sum().backward()
    return [*found, take(True)]


# Threads and lifetimes


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_backwards_of_threads_keep_apart(recorder: str) -> None:
    """Each thread's gradients have its own size: of the three places of one sum all have that of their batch."""
    model = Fork()
    failures: list[BaseException] = []
    sizes = [2.0**i for i in range(3)]

    def run(size: float) -> None:
        try:
            for _ in range(40):
                model(batch()[:2]).backward(torch.full((2, SIDE), size))
        except BaseException as error:
            failures.append(error)

    with watched(model, recorder, gradients=True, max_frames=10_000) as w:
        threads = [threading.Thread(target=run, args=[size]) for size in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        frames = [frame for frame in w.frames if frame.phase == "backward"]
        assert w.counters.get("stale_hits", 0) == 0
    assert not failures
    of_batch: dict[int, list[float | None]] = {}
    for frame in frames:
        of_batch.setdefault(frame.batch, []).extend(
            r.abs_max for r in frame.records if r.label == "output.grad"
        )
    assert sorted(map(tuple, of_batch.values())) == sorted((size,) * 3 for size in sizes for _ in range(40))


@pytest.mark.parametrize("recorder", ["none", *WITH_DEVICE])
@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_left_at_a_gradient(recorder: str, breaks: bool) -> None:
    """After a backward, also one that an exception ended, its gradients can be swapped, which takes a sole owner."""
    kept: list[Tensor] = []

    def fails(g: Tensor) -> None:
        if breaks:
            raise LookupError("mine")

    model = Fork(first=fails, second=kept.append)
    w = None if recorder == "none" else watched(model, recorder, gradients=True)
    y = model(batch())
    try:
        y.backward(torch.ones(SIDE, SIDE))
    except LookupError:
        assert breaks
    del y
    gc.collect()
    torch.utils.swap_tensors(kept[0], torch.zeros(3))
    assert kept[0].tolist() == [0.0] * 3
    if w is not None:
        w.stop()


def test_every_gradient_is_gone_when_it_would_be() -> None:
    """At each place the gradients alive, and the storages, are those alive unwatched."""
    alive: dict[str, list[Any]] = {}
    for recorder in ["none", *available()]:
        references: list[Any] = []
        states: list[list[bool]] = []

        def note(g: Tensor, references: Any = references, states: Any = states) -> None:
            states.append([one() is not None for one in references])
            references.append(weakref.ref(g))
            weakref.finalize(g.untyped_storage(), lambda: None)

        model = nn.Sequential(*(Fork(first=note, second=note) for _ in range(6)))
        w = None if recorder == "none" else watched(model, recorder, gradients=True)
        loss = model(batch()).square().sum()
        loss.backward()
        del loss
        states.append([one() is not None for one in references])
        alive[recorder] = states
        if w is not None:
            w.stop()
    assert all(states == alive["none"] for states in alive.values())
    assert not any(alive["none"][-1])


@pytest.mark.slow
@pytest.mark.parametrize("recorder", RECORDERS)
def test_nothing_grows(recorder: str) -> None:
    """Over many backwards, some of which fail, neither the C heap nor Python's memory grows by a tensor's shell."""

    def fails(g: Tensor) -> None:
        if not g.any():
            raise LookupError("mine")

    model = nn.Sequential(*(Fork(first=fails) for _ in range(4)))

    def run(steps: int) -> None:
        for step in range(steps):
            y = model(batch()[:2])
            try:
                y.backward(torch.full((2, SIDE), float(step % 3 != 0)))
            except LookupError:
                assert step % 3 == 0
            model.zero_grad()

    with watched(model, recorder, gradients=True, forecast=False):
        # A shell takes about 200 bytes, and up to 16 are kept.
        assert_no_growth(run, 40, 200)
