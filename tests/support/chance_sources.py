"""Steps that are not repeatable, each with the module and words that the finding should have.

Races of threads and atomics are emulated by a counter that no trial touches.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.compare.trials import temporarily

_race = itertools.count(1)


class Source(NamedTuple):
    """Source of chance: what makes the middle module, words of its cause, and of the change that cures it."""

    part: Callable[[], nn.Module]
    words: str
    cure: str = ""
    around: Callable[[], Any] = nullcontext
    kind: str = "output"


class Forward(nn.Module):
    """Module with this forward, and nothing else."""

    def __init__(self, function: Callable[[Forward, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def clock(self: Forward, x: Tensor) -> Tensor:
    return x * (1 + time.time() % 1)


def numpy_generator(self: Forward, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.default_rng().standard_normal(4, dtype=np.float32))


class _NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (time.time() % 1)


def noisy_backward(self: Forward, x: Tensor) -> Tensor:
    return _NoisyBackward.apply(x)


@torch.library.custom_op("not_repeatable::chunked_sum", mutates_args=())
def chunked_sum(x: Tensor) -> Tensor:
    """Sum that depends on how threads have shared the work."""
    return x + (next(_race) if torch.get_num_threads() > 1 else 0)


@contextmanager
def atomics(name: str) -> Iterator[None]:
    """Let an operation of PyTorch race as on CUDA, unless deterministic algorithms are on."""
    library = torch.library.Library("aten", "IMPL")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return args[0] + (0 if torch.are_deterministic_algorithms_enabled() else next(_race))

    try:
        library.impl(name, kernel, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()


def index_add(self: Forward, x: Tensor) -> Tensor:
    return torch.zeros(3, 4).index_add(0, torch.tensor([0, 0, 1]), x.detach())


class Overwritten(nn.Module):
    """Module whose buffer another thread writes, past PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))
        self.view = self.shift.numpy()

    def forward(self, x: Tensor) -> Tensor:
        def write() -> None:
            self.view[:] = np.frombuffer(os.urandom(4), dtype=np.uint8)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        return x + self.shift


class FreshDropout(nn.Dropout):
    """Dropout with fresh seeds."""

    def forward(self, x: Tensor) -> Tensor:
        torch.seed()
        return super().forward(x)


SOURCES = {
    "clock": Source(lambda: Forward(clock), "time.time()", "clocks"),
    "numpy_generator": Source(
        lambda: Forward(numpy_generator), "numpy.random.default_rng()", "manual_seed(0)"
    ),
    "dropout": Source(FreshDropout, "dropout. A trial shows random numbers", "manual_seed(0)"),
    "backward": Source(lambda: Forward(noisy_backward), "time.time()", "clocks", kind="gradient"),
    "chunks": Source(
        lambda: Forward(lambda self, x: chunked_sum(x.detach())),
        "threads split",
        "set_num_threads(1)",
        lambda: temporarily(torch.set_num_threads, 2, torch.get_num_threads()),
    ),
    "index_add": Source(lambda: Forward(index_add), "atomic", "deterministic", lambda: atomics("index_add")),
    "foreign_write": Source(Overwritten, "os.urandom()", "manual_seed(0)"),
    "unknown": Source(lambda: Forward(lambda self, x: x * next(_race)), "no change that was tried"),
}


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """Return a training step."""

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def wrong(source: Source) -> Iterator[str]:
    """Yield each fact that a comparison of two runs states otherwise: module, cause and cure."""
    model = nn.Sequential(nn.Linear(4, 4), source.part(), nn.Linear(4, 1))
    step = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with source.around():
        result = nanwatch.twice(step, batches=[torch.randn(3, 4) for _ in range(2)])
    difference = result.difference
    if difference is None:
        yield "no difference"
        return
    expected = ("0" if source.kind == "gradient" else "1", source.kind)
    if (difference.module, difference.kind) != expected:
        yield f"{difference.where}, not {expected}"
    if source.words not in difference.cause:
        yield f"cause: {difference.cause}; {source.words!r} is not in it"
    cures = [trial.change for trial in result.tried if trial.outcome == "equal"]
    if len(cures) != bool(source.cure) or source.cure not in "".join(cures):
        yield f"cures: {cures}, not {source.cure!r}"
