"""Known causes of runs that part, and trials: changes of a run's surroundings that take one source of chance away each.

A run that becomes repeatable under a trial has shown its cause. Trials that replace a function note who called it.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..util.program_code import SKIPPED_FILES, is_library
from ..util.visible import users_frame

Note = Callable[[str], object]
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_START = 1_700_000_000 * 10**9
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time")
_KEEP_TIME = ("logging", "threading", "queue")
# Parameters of a DataLoader that one without workers refuses.
_OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


@dataclass(frozen=True)
class Trial:
    """Change of a run's surroundings.

    `change` is what to write into the program, as code where that is possible. `cause` is what it shows when the runs
    become equal, with the noted calls behind it. `patch(note)` is the context of the run, and `environment` that of its
    process.
    """

    change: str
    cause: str
    patch: Callable[[Note], AbstractContextManager[Any]] = lambda note: nullcontext()
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def temporarily(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Set a value for the block, and after it the one from before."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextmanager
def _deterministic(note: Note) -> Iterator[None]:
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    # cuBLAS reads it when it is first used. Without it, torch refuses matrix products on CUDA.
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with cudnn.flags(cudnn.enabled, benchmark=False, deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextmanager
def _seeded(note: Note) -> Iterator[None]:
    """Seed the global generators, give fixed bytes for the operating system's random ones, and 0 where no seed is."""
    random.seed(0)
    torch.manual_seed(0)
    numbers = random.Random(0)
    python_seed = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            _note_call("random.Random()", note)
        python_seed(self, 0 if a is None else a, version)

    def with_seed(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda seed=None, *args, **kwargs: function(0 if seed is None else seed, *args, **kwargs)

    functions: dict[str, tuple[Any, Any]] = {
        "os.urandom()": (os.urandom, numbers.randbytes),
        "torch.seed()": (torch.seed, lambda: torch.manual_seed(0).initial_seed()),
        "random.seed()": (random.seed, with_seed(random.seed)),
    }
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(0)
        for name in ("default_rng", "seed"):
            functions[f"numpy.random.{name}()"] = getattr(numpy, name), with_seed(getattr(numpy, name))
    with temporarily(partial(setattr, random.Random, "seed"), seed, python_seed), _replaced(functions, note):
        yield


@contextmanager
def _stopped_clock(note: Note) -> Iterator[None]:
    """Let each clock of the module time advance by 1 ms a call, from the same moment in each run."""
    functions: dict[str, tuple[Any, Any]] = {}
    for name in _CLOCKS:
        # A counter for each: threads of libraries, which ask one clock, do not move the others.
        now = itertools.count(_START, 1_000_000).__next__
        functions[f"time.{name}()"] = getattr(time, name), lambda now=now: now() / 1e9
        functions[f"time.{name}_ns()"] = getattr(time, f"{name}_ns"), now
    with _replaced(functions, note):
        yield


@contextmanager
def _ordered(note: Note) -> Iterator[None]:
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

    with temporarily(partial(setattr, DataLoader, "__init__"), init, before):
        yield


def _note_call(name: str, note: Note) -> None:
    """Note that the program has called a function, and where, unless one of its libraries or an import has."""
    frame = users_frame(sys._getframe(1))
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and not is_library(frame.f_code.co_filename):
        note(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")


@contextmanager
def _replaced(functions: dict[str, tuple[Any, Any]], note: Note) -> Iterator[None]:
    """Replace functions, (old, new) by name, in their own modules and where the program has imported them by name.

    Calls that give no seed, or take no argument, are noted.
    """

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "os.urandom()" or not args or args[0] is None:
                _note_call(name, note)
            return function(*args, **kwargs)

        return call

    new = {id(old): noting(name, function) for name, (old, function) in functions.items()}
    with ExitStack() as after:
        for key, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            # Programs ask for torch.seed in torch, whose other modules are left alone.
            if (file.startswith(SKIPPED_FILES) and module is not torch) or key in _KEEP_TIME:
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in new:
                    after.callback(setattr, module, name, value)
                    setattr(module, name, new[id(value)])
        yield


TRIALS = {
    "seeds": Trial(
        "torch.manual_seed(0), random.seed(0), numpy.random.seed(0) at the start, and seeds for all other generators",
        "random numbers that the program does not seed",
        _seeded,
    ),
    "order": Trial(
        "DataLoader(generator=torch.Generator().manual_seed(0), num_workers=0) and PYTHONHASHSEED=0",
        "the order of the data: a data loader, its workers, or a set, which Python orders anew in each process",
        _ordered,
        {"PYTHONHASHSEED": "0"},
    ),
    "time": Trial(
        "the clocks of the module time moved on by 1 ms a call",
        "a time that the program reads",
        _stopped_clock,
    ),
    "threads": Trial(
        "torch.set_num_threads(1)",
        "a sum that threads split in another way in each run",
        lambda note: temporarily(torch.set_num_threads, 1, torch.get_num_threads()),
        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    ),
    "atomics": Trial(
        "torch.use_deterministic_algorithms(True)",
        "an operation for which PyTorch has a deterministic kernel, as for atomic additions on CUDA, or memory that"
        " torch.empty leaves unwritten",
        _deterministic,
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
}
