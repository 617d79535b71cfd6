"""A watch costs no compilation: counts with and without one, in each order of watching, compiling and stopping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from nanwatch.session.watch import Watch
from support.recorders import needs_native
from support.toys import names
from support.watching import watch

pytestmark = needs_native


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.act(self.first(x)))


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Program:
    """Compiles models, and watches them if it is told to."""

    def __init__(self, backend: str, watches: bool) -> None:
        self.counter = CompileCounterWithBackend(backend)
        self.watches = watches

    def compile(self, function: Any, **options: Any) -> Any:
        return torch.compile(function, backend=self.counter, fullgraph=True, **options)

    def watch(self, model: nn.Module, **options: Any) -> Watch:
        return watch(model, enabled=self.watches, max_frames=1000, **options)


def of_stack(depth: int = 3) -> list[str]:
    inside = [f"layers.{layer}{part}" for layer in range(depth) for part in (".first", ".act", ".last", "")]
    return [*inside, ""]


def seen(w: Watch) -> list[str]:
    return [name for _, name in names(w)]


def x(rows: int = 2) -> Tensor:
    return torch.ones(rows, 8)


def regional(program: Program) -> None:
    """More layers than Dynamo compiles one function for (8), in training."""
    model = Stack(12)
    for layer in model.layers:
        layer.compile(backend=program.counter, fullgraph=True)
    with program.watch(model) as w:
        model(x()).sum().backward()
        model(x()).sum().backward()
    assert seen(w) == (of_stack(12) * 2 if program.watches else [])


def called_by_a_function(program: Program) -> None:
    """One graph for a function that gets a model as an argument."""
    models = [Stack(), Stack()]
    call = program.compile(lambda model, x: model(x) * 2)
    with program.watch(models[0]) as first, program.watch(models[1]) as second:
        for model in models:
            call(model, x())
    assert seen(first) == seen(second) == (of_stack() if program.watches else [])


def dynamic_shapes(program: Program) -> None:
    """Sizes that come before, after and between two watches."""
    model = Stack()
    call = program.compile(model)
    watches = []
    for sizes in ((2,), (3, 4), (5,)):
        with program.watch(model) as w:
            for size in sizes:
                call(x(size))
        watches.append(seen(w))
        call(x(sizes[-1] + 10))
    assert watches == ([of_stack() * count for count in (1, 2, 1)] if program.watches else [[], [], []])


def other_options(program: Program) -> None:
    """What a watch reads, and of which modules, is no part of a graph; nor is `stop()`, or a recompilation allowed."""
    model = Stack()
    call = program.compile(model)
    with program.watch(model):
        call(x())
    torch.compiler.set_stance("fail_on_recompile")
    call(x())
    with program.watch(model, modules="*.act", read="buffers outputs") as w:
        call(x())
        w.pause()
        call(x())
        w.resume()
        call(x())
    assert seen(w) == ([f"layers.{layer}.act" for layer in range(3)] * 2 if program.watches else [])
    assert {record.label for frame in w.frames for record in frame.records} <= {"output"}


def a_part_after_the_whole(program: Program) -> None:
    """A graph that was made for a watch of the model serves one of a layer."""
    model = Stack()
    call = program.compile(lambda x: model(x))
    with program.watch(model):
        call(x())
    with program.watch(model.layers[1]) as w:
        call(x())
        call(x())
    assert seen(w) == (["first", "act", "last", ""] * 2 if program.watches else [])


def a_watch_of_another_model_begins(program: Program) -> None:
    """With layers of the same classes, none of which may be compiled again."""
    calls = [program.compile(model) for model in (Stack(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))]
    for call in calls:
        call(x())
    torch.compiler.set_stance("fail_on_recompile")
    for model in (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Stack()):
        with program.watch(model):
            model(x())
            for call in calls:
                call(x())


PROGRAMS = (
    regional, called_by_a_function, dynamic_shapes, other_options, a_part_after_the_whole,
    a_watch_of_another_model_begins,
)  # fmt: skip


@pytest.mark.parametrize("run", PROGRAMS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_watch_costs_no_compilation(backend: str, run: Callable[[Program], None]) -> None:
    """The same program compiles as often watched as unwatched, and each watch has the frames of its batches."""
    counts = []
    for watches in (False, True):
        torch._dynamo.reset()
        program = Program(backend, watches)
        run(program)
        torch.compiler.set_stance("default")
        counts.append(program.counter.frame_count)
    assert counts[0] == counts[1] > 0
