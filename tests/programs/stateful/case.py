"""What a stateful program uses: its mark, the watch of either run, and its state at the end.

A program is a function below `@case(...)`. It trains, goes on after a non-finite batch, and returns its state as a dict
that JSON takes. Unwatched, `watch` stands for the check that a user writes: an output or a gradient that is not finite
raises before the step. So both runs skip the same steps.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import nanwatch

State = Callable[[], dict[str, Any]]


class Program(NamedTuple):
    """A program, and the operation that its report should name. `cure`: a patch that works applies."""

    function: State
    operation: str
    cure: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def file(self) -> Path:
        return Path(self.function.__code__.co_filename)


PROGRAMS: dict[str, Program] = {}


def case(operation: str, *, cure: bool = False) -> Callable[[State], State]:
    """Add the function to PROGRAMS."""

    def add(function: State) -> State:
        PROGRAMS[function.__name__] = Program(function, operation, cure)
        return function

    return add


class PlainNonFiniteError(ArithmeticError):
    """Raised by the user's own check."""


class Run:
    """The present run: whether it is watched, its findings, and how often the user's own check has raised."""

    watched = False
    findings: list[Any] = []  # noqa: RUF012
    bad = 0


def run(program: Program, *, watched: bool) -> dict[str, Any]:
    """Run the program and return its state."""
    Run.watched, Run.bad = watched, 0
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return program.function()


def watch(model: nn.Module, **options: Any) -> None:
    """Watch the model, or check it as a user without nanwatch does."""
    if Run.watched:
        nanwatch.watch(model, **options)
        return
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: _check([*args, output]))
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: _check(p.grad for group in optimizer.param_groups for p in group["params"])
    )


def _check(values: Iterable[Any]) -> None:
    if not all(bool(x.isfinite().all()) for x in values if isinstance(x, Tensor) and x.is_floating_point()):
        Run.bad += 1
        raise PlainNonFiniteError


@contextlib.contextmanager
def skipped() -> Iterator[None]:
    """Go on after a non-finite step and keep its finding, as a user writes it to a log."""
    try:
        yield
    except (PlainNonFiniteError, nanwatch.NonFiniteError) as error:
        if isinstance(error, nanwatch.NonFiniteError):
            Run.findings.append(error.report.finding)


def ends(model: nn.Module) -> dict[str, Any]:
    """Return what every program ends with: its weights and buffers, and the next draws of all random states."""
    draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    return {"draws": draws, "weights": {name: x.tolist() for name, x in model.state_dict().items()}}
