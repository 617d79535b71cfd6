"""Trials: changes of the surroundings of a run, each of which takes one source of chance away.

A run that becomes repeatable under a trial has shown its cause. Trials that replace a function note who called it.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..diagnosis.provenance import SKIPPED_FILES, program_frame

Note = Callable[[str], object]
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_START = 1_700_000_000.0


@dataclass(frozen=True)
class Trial:
    """Change of a run's surroundings.

    `change` is what to write into the program, as code where that is possible. `cause` is what it shows when the runs
    become equal, with the noted calls behind it. `patch(note)` is the context of the run, and `environment` that of its
    process. `for_scripts`: it makes sense only for runs in processes of their own.
    """

    name: str
    change: str
    cause: str
    patch: Callable[[Note], AbstractContextManager[Any]] = lambda note: nullcontext()
    environment: dict[str, str] = field(default_factory=dict)
    for_scripts: bool = False


@contextmanager
def _deterministic(note: Note) -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    # cuBLAS reads it when it is first used. Without it, torch refuses matrix products on CUDA.
    is_given = "CUBLAS_WORKSPACE_CONFIG" in os.environ
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
        if not is_given:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextmanager
def _one_thread(note: Note) -> Iterator[None]:
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


@contextmanager
def _seeded(note: Note) -> Iterator[None]:
    random.seed(0)
    torch.manual_seed(0)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(0)
    yield


@contextmanager
def _no_fresh_entropy(note: Note) -> Iterator[None]:
    """Give fixed bytes for the operating system's random ones, and the seed 0 where none is given."""
    numbers = random.Random(0)
    python_seed = random.Random.seed
    done: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (os.urandom, _noting("os.urandom()", note, numbers.randbytes)),
        (
            uuid.uuid4,
            _noting("uuid.uuid4()", note, lambda: uuid.UUID(int=numbers.getrandbits(128), version=4)),
        ),
        (torch.seed, _noting("torch.seed()", note, lambda: torch.manual_seed(0).initial_seed())),
        (random.seed, _seeding("random.seed()", note, random.seed)),
    ]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        done += [
            (numpy.default_rng, _seeding("numpy.random.default_rng()", note, numpy.default_rng)),
            (numpy.seed, _seeding("numpy.random.seed()", note, numpy.seed)),
        ]

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            note_call("random.Random()", note)
            a = 0
        python_seed(self, a, version)

    random.Random.seed = seed  # type: ignore[method-assign]
    try:
        with _replaced(done):
            yield
    finally:
        random.Random.seed = python_seed  # type: ignore[method-assign]


@contextmanager
def _stopped_clock(note: Note) -> Iterator[None]:
    """Let each clock of the module time advance by 1 ms a call, from the same moment in each run."""
    done: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        # A counter for each: threads of libraries, which ask one clock, do not move the others.
        now = itertools.count(int(_START * 1e9), 1_000_000).__next__
        done += [
            (getattr(time, name), _noting(f"time.{name}()", note, lambda now=now: now() / 1e9)),
            (getattr(time, f"{name}_ns"), _noting(f"time.{name}_ns()", note, now)),
        ]
    with _replaced(done):
        yield


@contextmanager
def _ordered_loaders(note: Note) -> Iterator[None]:
    """Make data loaders without workers, whose samplers have generators with the seed 0."""
    before = DataLoader.__init__

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        workers = kwargs.pop("num_workers", args[5] if len(args) > 5 else 0)
        if workers:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
                kwargs.pop(name, None)
        if len(args) > 5:
            args = (*args[:5], 0, *args[6:])
        samplers: list[Any] = [kwargs.get("sampler"), getattr(kwargs.get("batch_sampler"), "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "generator"):
                sampler.generator = torch.Generator().manual_seed(0)
        kwargs["generator"] = torch.Generator().manual_seed(0)
        note_call("a DataLoader", note)
        before(self, *args, **kwargs)

    DataLoader.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__init__ = before  # type: ignore[method-assign]


def note_call(name: str, note: Note) -> None:
    """Note that the program has called a function, and where, unless one of its libraries has."""
    frame = program_frame(None)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and "site-packages" not in frame.f_code.co_filename:
        note(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")


def _noting(name: str, note: Note, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        note_call(name, note)
        return function(*args, **kwargs)

    return call


def _seeding(name: str, note: Note, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        if seed is None:
            note_call(name, note)
        return function(0 if seed is None else seed, *args, **kwargs)

    return call


@contextmanager
def _replaced(functions: Iterable[tuple[Callable[..., Any], Callable[..., Any]]]) -> Iterator[None]:
    """Replace functions in their own modules and where the program has imported them by name."""
    new = {id(old): one for old, one in functions}
    with ExitStack() as after:
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None) or ""
            if file.startswith(SKIPPED_FILES):
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in new and getattr(module, "__name__", "") not in (
                    "logging",
                    "threading",
                    "queue",
                ):
                    after.callback(setattr, module, name, value)
                    setattr(module, name, new[id(value)])
        # torch's own functions are replaced where programs ask for them.
        for name in ("seed",):
            value = getattr(torch, name)
            if id(value) in new:
                after.callback(setattr, torch, name, value)
                setattr(torch, name, new[id(value)])
        yield


SEEDS = "torch.manual_seed(0), random.seed(0), numpy.random.seed(0)"
TRIALS = {
    one.name: one
    for one in (
        Trial(
            "seeds",
            f"{SEEDS} at the start",
            "the program draws from the global random number generators and does not seed them",
            _seeded,
            for_scripts=True,
        ),
        Trial(
            "loader",
            "DataLoader(generator=torch.Generator().manual_seed(0), num_workers=0)",
            "the order or the workers of a data loader",
            _ordered_loaders,
            for_scripts=True,
        ),
        Trial(
            "hash",
            "PYTHONHASHSEED=0",
            "the order of a set, or another use of hash(), which Python seeds anew in each process",
            environment={"PYTHONHASHSEED": "0"},
            for_scripts=True,
        ),
        Trial(
            "clock",
            "the clocks of the module time held still",
            "a time that the program reads",
            _stopped_clock,
        ),
        Trial(
            "entropy",
            "fixed seeds in place of the operating system's random bytes",
            "fresh random bytes of the operating system, or a generator seeded with them",
            _no_fresh_entropy,
        ),
        Trial(
            "threads",
            "torch.set_num_threads(1)",
            "a sum that threads split in another way in each run",
            _one_thread,
            {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        ),
        Trial(
            "deterministic",
            "torch.use_deterministic_algorithms(True)",
            "an operation for which PyTorch has a deterministic kernel, or memory that torch.empty leaves unwritten",
            _deterministic,
            {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        ),
    )
}
