"""Steps that are not repeatable, each with the module, operation, line and words that the finding should have.

The line at which the difference comes about ends in `# part`. Races of threads and atomics are emulated.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.compare.trials import temporarily


class Source(NamedTuple):
    """Source of chance: what makes the middle module, words of its cause, and of the change that cures it."""

    part: Callable[[], nn.Module]
    operation: str
    words: str
    cure: str = ""
    around: Callable[[], Any] = nullcontext
    module: str = "1"


class Forward(nn.Module):
    """Module with this forward, and nothing else."""

    def __init__(self, function: Callable[[Forward, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def clock(self: Forward, x: Tensor) -> Tensor:
    factor = 1 + time.time() % 1
    return x * factor  # part


def numpy_generator(self: Forward, x: Tensor) -> Tensor:
    noise = torch.from_numpy(np.random.default_rng().standard_normal(4, dtype=np.float32))  # part
    return x + noise


class OwnGenerator(nn.Module):
    """Dropout with a generator of its own, which goes on from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)  # part


class Remembers(nn.Module):
    """Module with a plain tensor as its memory, which is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.memory  # part
        self.memory += x.detach().mean(0)
        return out


class Counts(nn.Module):
    """Module that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls  # part


class Takes(nn.Module):
    """Module that takes another branch in every fourth call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(0)
        return x.relu() if len(self.calls) % 4 == 1 else x.tanh()  # part


_JITTER = (os.urandom,)  # where no trial finds it: threads are late by chance


def racing_threads(self: Forward, x: Tensor) -> Tensor:
    def late(i: int) -> Tensor:
        time.sleep(_JITTER[0](1)[0] / 2**15)
        return x * 3.0**i

    with ThreadPoolExecutor(8) as pool:
        parts = [one.result() for one in as_completed([pool.submit(late, i) for i in range(8)])]
    return torch.stack(parts).sum(0)  # part


class _NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (time.time() % 1)  # part


def noisy_backward(self: Forward, x: Tensor) -> Tensor:
    return _NoisyBackward.apply(x)


@torch.library.custom_op("not_repeatable::chunked_sum", mutates_args=())
def chunked_sum(x: Tensor) -> Tensor:
    """Sum that depends on how threads have shared the work."""
    return x + (int.from_bytes(os.urandom(2), "little") if torch.get_num_threads() > 1 else 0)


def chunked(self: Forward, x: Tensor) -> Tensor:
    return chunked_sum(x.detach())  # part


@contextmanager
def atomics(name: str, overload: str) -> Iterator[None]:
    """Let an operation of PyTorch race as on CUDA, unless deterministic algorithms are on."""
    library = torch.library.Library("aten", "IMPL")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        out = args[0].clone()
        if not torch.are_deterministic_algorithms_enabled():
            out += int.from_bytes(os.urandom(2), "little")
        return out

    try:
        library.impl(f"{name}{overload}", kernel, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()


def index_add(self: Forward, x: Tensor) -> Tensor:
    return torch.zeros(3, 4).index_add(0, torch.tensor([0, 0, 1]), x.detach())  # part


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
        return x + self.shift  # part


SOURCES = {
    "clock": Source(lambda: Forward(clock), "aten.mul.Tensor", "time.time()", "clocks"),
    "numpy_generator": Source(
        lambda: Forward(numpy_generator),
        "aten.lift_fresh.default",
        "numpy.random.default_rng()",
        "manual_seed(0)",
    ),
    "own_generator": Source(OwnGenerator, "aten.rand.generator", "torch.Generator of its own", "attributes"),
    "memory": Source(Remembers, "aten.add.Tensor", "run to run: 1.memory", "attributes"),
    "counter": Source(Counts, "aten.div.Tensor", "1.calls", "attributes"),
    "branch": Source(Takes, "aten.relu.default", "another branch", "attributes"),
    "threads_order": Source(lambda: Forward(racing_threads), "aten.stack.default", "as_completed()"),
    "backward": Source(lambda: Forward(noisy_backward), "aten.mul.Tensor", "time.time()", "clocks"),
    "chunks": Source(
        lambda: Forward(chunked),
        "not_repeatable.chunked_sum.default",
        "threads split",
        "set_num_threads(1)",
        lambda: temporarily(torch.set_num_threads, 2, torch.get_num_threads()),
    ),
    "index_add": Source(
        lambda: Forward(index_add),
        "aten.index_add.default",
        "atomics",
        "deterministic",
        lambda: atomics("index_add", ""),
    ),
    "foreign_write": Source(Overwritten, "aten.add.Tensor", "", "manual_seed(0)"),
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
    """Yield each fact that a comparison of two runs states otherwise: module, operation, line, cause and cure."""
    model = nn.Sequential(nn.Linear(4, 4), source.part(), nn.Linear(4, 1))
    step = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with source.around():
        result = nanwatch.twice(step, batches=[torch.randn(3, 4) for _ in range(2)])
    difference = result.difference
    if difference is None:
        yield "no difference"
        return
    place = difference.operation_module, difference.operation
    if place != (source.module, source.operation):
        yield f"{place[1]} of {place[0]!r}, not {source.operation} of {source.module!r}"
    if not difference.code.endswith("# part"):
        yield f"line: {difference.code}"
    if source.words not in difference.cause:
        yield f"cause: {difference.cause}; {source.words!r} is not in it"
    cures = [trial.change for trial in result.tried if trial.outcome == "equal"]
    if len(cures) != bool(source.cure) or source.cure not in "".join(cures):
        yield f"cures: {cures}, not {source.cure!r}"
