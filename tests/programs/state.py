"""What a stateful program uses: its mark, the watch of either run, and its state at the end.

A program is a function below `@keeps_state(...)`. It trains, goes on after a non-finite batch, and returns its state as
a dict that JSON takes. Unwatched, `watch` stands for the check that a user writes: an output or a gradient that is not
finite raises before the step. So both runs skip the same steps.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import nanwatch
from programs.case import Case

State = Callable[[], dict[str, Any]]
PROGRAMS: dict[str, Case] = {}


def keeps_state(operation: str) -> Callable[[State], State]:
    """Enter the function into PROGRAMS, with the operation that makes the value."""

    def enter(function: State) -> State:
        name, file = function.__name__, Path(inspect.getfile(function))
        PROGRAMS[name] = Case(name, function, file, "", operations=(operation,))  # type: ignore[arg-type]
        return function

    return enter


class PlainNonFiniteError(ArithmeticError):
    """Raised by the user's own check."""


class Run:
    """The present run: whether it is watched, its findings, and how often the user's own check has raised."""

    watched = False
    findings: list[Any] = []  # noqa: RUF012
    bad = 0


def run(case: Case, *, watched: bool) -> dict[str, Any]:
    """Run the program and return its state."""
    Run.watched, Run.bad = watched, 0
    random.seed(0)
    np.random.seed(0)
    return case.build()  # type: ignore[return-value]


def watch(model: nn.Module) -> None:
    """Watch the model and its gradients, or check them as a user without nanwatch does."""
    if Run.watched:
        nanwatch.watch(model, gradients=True)
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


def train(model: nn.Module, loss_of: Callable[[int], Tensor], steps: int = 5) -> None:
    """Watch and train. Go on after a non-finite step and keep its finding, as a user writes it to a log."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model)
    for step in range(steps):
        optimizer.zero_grad()
        try:
            loss_of(step).backward()
            optimizer.step()
        except PlainNonFiniteError:
            pass
        except nanwatch.NonFiniteError as error:
            Run.findings.append(error.report.finding)


def ends(model: nn.Module) -> dict[str, Any]:
    """Return what every program ends with: its weights and buffers, and the next draws of all random states."""
    draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    return {"draws": draws, "weights": {name: x.tolist() for name, x in model.state_dict().items()}}
