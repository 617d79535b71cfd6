"""Parts that the trainings share: which form runs, the tool that watches, the losses, seeded data.

A training is a plain script. It reads FORM, builds its model and optimizer, and trains inside `watch(model)`. It calls
`note(loss)` after each optimizer step. Without a runner both do nothing but print, so the script runs by itself:

    SILENT_FORM=faulty PYTHONPATH=benchmarks python benchmarks/silent/trainings/zero_grad_missing.py
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FORMS = ("faulty", "mended", "twin")
FORM = os.environ.get("SILENT_FORM", "faulty")
FAULTY, MENDED, TWIN = (form == FORM for form in FORMS)
STEPS = 10

# A runner sets these before it runs the script. A tool gets the model and what the user says of it (`frozen=...`).
tool: Callable[..., AbstractContextManager[Any]] | None = None
after_step: Callable[[int, float], None] | None = None
losses: list[float] = []
facts: dict[str, float] = {}
seconds = 0.0


@contextlib.contextmanager
def watch(model: nn.Module, **intent: Any) -> Iterator[None]:
    """Train inside the tool that is judged; intent is what the user means of the model, for tools that take it."""
    global seconds
    begin = time.perf_counter()
    with contextlib.nullcontext() if tool is None else tool(model, **intent):
        yield
    seconds += time.perf_counter() - begin
    if out := os.environ.get("SILENT_OUT"):  # for a tool that is a command
        with open(out, "w") as file:
            json.dump({"losses": losses, "facts": facts, "seconds": seconds}, file)


def note(loss: Tensor | float) -> None:
    """Log the loss of a step that is over."""
    losses.append(float(loss))
    print(f"step {len(losses)} loss {losses[-1]:.5f}", flush=True)
    if after_step is not None:
        after_step(len(losses), losses[-1])


def fact(name: str, value: float) -> None:
    """Keep a number that shows the fault's effect, for the oracle of the case."""
    facts[name] = float(value)


def regression(inputs: int = 8, outputs: int = 1, rows: int = 64, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs and the outputs of a fixed teacher, float32, of shape (rows, inputs) and (rows, outputs)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    teacher = torch.randn(inputs, outputs, generator=generator)
    return x, torch.tanh(x @ teacher) + 0.3


def classes(inputs: int = 8, count: int = 4, rows: int = 64, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs of shape (rows, inputs) and their class, an int64 of shape (rows,)."""
    x, scores = regression(inputs, count, rows, seed)
    return x, scores.argmax(1)


def tokens(vocabulary: int = 32, length: int = 8, rows: int = 32, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return sequences of a fixed cycle through the vocabulary, and each token's successor."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(vocabulary, generator=generator)
    successor = torch.empty_like(order).scatter_(0, order, order.roll(-1))
    x = torch.randint(vocabulary, (rows, 1), generator=generator)
    columns = [x]
    for _ in range(length):
        columns.append(successor[columns[-1]])
    sequence = torch.cat(columns, 1)
    return sequence[:, :-1], sequence[:, 1:]


def batches(*tensors: Tensor, size: int = 16, steps: int = STEPS) -> Iterator[tuple[Tensor, ...]]:
    """Yield steps batches in order, again from the front when the rows are used up."""
    rows = len(tensors[0])
    for step in range(steps):
        begin = step * size % rows
        yield tuple(tensor[begin : begin + size] for tensor in tensors)


def ranks() -> tuple[int, int]:
    """Join the gloo group that torchrun or the runner describes; return the rank and the number of ranks."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def share(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor."""
    return tensor[dist.get_rank() :: dist.get_world_size()]


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
