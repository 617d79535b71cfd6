"""Known causes of runs that part, and trials: changes of a run's surroundings that take one source of chance away each.

A run that becomes repeatable under a trial has shown its cause. Trials that replace a function note who called it.
A run has a process of its own, so replaced functions alone are put back: clocks that stand still may hang an exit.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..util.program_code import is_library
from ..util.visible import users_frame

Note = Callable[[str], object]
# A module, the name of a function in it, and what takes its place.
Replacement = tuple[Any, str, Callable[..., Any]]
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_START = 1_700_000_000 * 10**9
# Parameters of a DataLoader that one without workers refuses.
_OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


@dataclass(frozen=True)
class Trial:
    """Change of a run's surroundings.

    `change` is what to write into the program, as code where that is possible. `cause` is what it shows when the runs
    become equal, with the noted calls behind it. `patch(note)` changes the process of the run, and may return what puts
    functions back. `environment` is that of the process.
    """

    change: str
    cause: str
    patch: Callable[[Note], Callable[[], object] | None] = lambda note: None
    environment: dict[str, str] = field(default_factory=dict)


def _be_deterministic(note: Note) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def _seed(note: Note) -> Callable[[], object]:
    """Seed the global generators, give fixed bytes for the operating system's random ones, and 0 where no seed is."""
    random.seed(0)
    torch.manual_seed(0)
    numbers = random.Random(0)
    python_seed = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            _note_call("random.Random()", note)
        python_seed(self, 0 if a is None else a, version)

    def seeded(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda seed=None, *args, **kwargs: function(0 if seed is None else seed, *args, **kwargs)

    functions: list[Replacement] = [
        (os, "urandom", numbers.randbytes),
        (random, "_urandom", numbers.randbytes),  # of SystemRandom, secrets and NumPy
        (random, "seed", seeded(random.seed)),
        (torch, "seed", lambda: torch.manual_seed(0).initial_seed()),
    ]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(0)
        functions += [(numpy, name, seeded(getattr(numpy, name))) for name in ("default_rng", "seed")]
    setattr(random.Random, "seed", seed)  # noqa: B010 - a method, for mypy
    return _replace(functions, note)


def _stop_clocks(note: Note) -> Callable[[], object]:
    """Let each clock of the module time advance by 1 ms a call, from the same moment in each run."""
    functions: list[Replacement] = []
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        # A counter for each: threads of libraries, which ask one clock, do not move the others.
        now = itertools.count(_START, 1_000_000).__next__
        functions += [(time, name, lambda now=now: now() / 1e9), (time, f"{name}_ns", now)]
    # PyTorch has imported timeit, which has perf_counter by a name of its own.
    functions.append((timeit, "default_timer", functions[2][2]))
    return _replace(functions, note)


def _order_data(note: Note) -> None:
    """Make data loaders without workers, whose samplers have generators with the seed 0."""
    before = DataLoader.__init__
    parameters = signature(before)

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        options = parameters.bind(self, *args, **kwargs).arguments
        for name in _OF_WORKERS:
            options.pop(name, None)
        samplers: list[Any] = [options.get("sampler"), getattr(options.get("batch_sampler"), "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "generator"):
                sampler.generator = torch.Generator().manual_seed(0)
        _note_call("a DataLoader", note)
        before(**{**options, "generator": torch.Generator().manual_seed(0)})

    setattr(DataLoader, "__init__", init)  # noqa: B010 - a method, for mypy


def _note_call(name: str, note: Note) -> None:
    """Note that the program has called a function, and where, unless one of its libraries or an import has."""
    frame = users_frame(sys._getframe(1))
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and not is_library(frame.f_code.co_filename):
        note(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")


def _replace(functions: list[Replacement], note: Note) -> Callable[[], object]:
    """Replace functions, each by its module and name, before the program imports them. Return what puts them back.

    Calls that give no seed, or take no argument, are noted.
    """
    before = [(module, name, getattr(module, name)) for module, name, _ in functions]

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name.endswith("urandom()") or not args or args[0] is None:
                _note_call(name, note)
            return function(*args, **kwargs)

        return call

    for module, name, function in functions:
        setattr(module, name, noting(f"{module.__name__}.{name}()", function))

    def undo() -> None:
        for place in before:
            setattr(*place)

    return undo


TRIALS = {
    "seeds": Trial(
        "torch.manual_seed(0), random.seed(0), numpy.random.seed(0) at the start, and seeds for all other generators",
        "random numbers that the program does not seed",
        _seed,
    ),
    "order": Trial(
        "DataLoader(generator=torch.Generator().manual_seed(0), num_workers=0) and PYTHONHASHSEED=0",
        "the order of the data: a data loader, its workers, or a set, which Python orders anew in each process",
        _order_data,
        {"PYTHONHASHSEED": "0"},
    ),
    "time": Trial(
        "the clocks of the module time moved on by 1 ms a call",
        "a time that the program reads",
        _stop_clocks,
    ),
    "threads": Trial(
        "torch.set_num_threads(1)",
        "a sum that threads split in another way in each run",
        lambda note: torch.set_num_threads(1),
        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    ),
    "atomics": Trial(
        "torch.use_deterministic_algorithms(True)",
        "an operation for which PyTorch has a deterministic kernel, as for atomic additions on CUDA, or memory that"
        " torch.empty leaves unwritten",
        _be_deterministic,
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
}
