"""Known causes of runs that part, and trials: changes of a run's surroundings that take one source of chance away each.

`explain` guesses causes by the operation in which runs part. A run that becomes repeatable under a trial has shown its
cause. Trials that replace a function note who called it.
"""

from __future__ import annotations

import itertools
import linecache
import os
import random
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..util.program_code import SKIPPED_FILES, is_library
from ..util.visible import users_frame
from .operations import OperationDifference

Note = Callable[[str], object]
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_START = 1_700_000_000.0
# Parameters of a DataLoader that one without workers refuses.
_OF_WORKERS = "num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"


@contextmanager
def temporarily(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Set a value for the block, and after it the one from before."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


@dataclass(frozen=True)
class Trial:
    """Change of a run's surroundings.

    `change` is what to write into the program, as code where that is possible. `cause` is what it shows when the runs
    become equal, with the noted calls behind it. `patch(note)` is the context of the run, and `environment` that of its
    process. `for_scripts`: it makes sense for runs in processes of their own alone.
    """

    change: str
    cause: str
    patch: Callable[[Note], AbstractContextManager[Any]] = lambda note: nullcontext()
    environment: dict[str, str] = field(default_factory=dict)
    for_scripts: bool = False


@contextmanager
def _deterministic(note: Note) -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
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
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
        if not is_given:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextmanager
def _seeded(note: Note) -> Iterator[None]:
    """Seed the global generators, give fixed bytes for the operating system's random ones, and 0 where no seed is."""
    random.seed(0)
    torch.manual_seed(0)
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
        numpy.seed(0)
        done += [
            (numpy.default_rng, _seeding("numpy.random.default_rng()", note, numpy.default_rng)),
            (numpy.seed, _seeding("numpy.random.seed()", note, numpy.seed)),
        ]

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            note_call("random.Random()", note)
            a = 0
        python_seed(self, a, version)

    with temporarily(partial(setattr, random.Random, "seed"), seed, python_seed), _replaced(done):
        yield


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
        note_call("a DataLoader", note)
        before(**{**options, "generator": torch.Generator().manual_seed(0)})

    with temporarily(partial(setattr, DataLoader, "__init__"), init, before):
        yield


def note_call(name: str, note: Note) -> None:
    """Note that the program has called a function, and where, unless one of its libraries or an import has."""
    frame = users_frame(sys._getframe(1))
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and not is_library(frame.f_code.co_filename):
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
    new = {id(old): function for old, function in functions}
    with ExitStack() as after:
        for key, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if file.startswith(SKIPPED_FILES):
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in new and key not in ("logging", "threading", "queue"):
                    after.callback(setattr, module, name, value)
                    setattr(module, name, new[id(value)])
        # Modules of torch are skipped above, and programs ask for this function there.
        if id(torch.seed) in new:
            after.enter_context(temporarily(partial(setattr, torch, "seed"), new[id(torch.seed)], torch.seed))
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
        for_scripts=True,
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
# This trial is for functions only: a script runs in a new process, which keeps nothing of the first run.
KEPT = Trial(
    "what modules keep in plain attributes put back before each run",
    "something that a module keeps from run to run",
)

# From the list at torch.use_deterministic_algorithms: operations whose CUDA kernels add with atomics.
_ATOMICS = re.compile(
    r"index_add|scatter|index_put|index_copy|put_|histc|bincount|cumsum|embedding.*backward|grid_sample|upsample"
    r"|interpolate|adaptive_.*backward|max_pool.*backward|max_unpool|reflection_pad|replication_pad|ctc_loss"
    r"|nll_loss2d|kthvalue|median|segment_reduce|repeat_interleave"
)
_DROPOUT = re.compile(r"dropout|bernoulli")
# Calls in the source of a function whose results differ from run to run, and the trials that hold them still.
_SUSPECTS = {
    r"\btime\.\w+\(|\b(?:perf_counter|monotonic)(?:_ns)?\(|datetime\.\w*now\(": "time",
    r"\b(?:urandom|uuid4|SystemRandom)\(|\bsecrets\.\w+\(|(?:default_rng|\bRandom|\.seed)\(\s*\)": "seeds",
    r"(?<![\w.])hash\(|(?<![\w.])(?:frozen)?set\(|\{[^:{}]+ for ": "order",
    r"(?<![\w.])id\(": "",
    r"\bas_completed\(|\bThread\(|\.submit\(|imap_unordered\(": "",
    r"\blistdir\(|\bscandir\(|\biglob\(|(?<![\w])glob\(": "",
}
# Lines before an operation in which such calls are looked for, up to the start of its function.
_LINES = 20


def explain(difference: OperationDifference) -> tuple[str, list[str]]:
    """Return the cause of a difference in one sentence, and the names of the trials to make first."""
    operation, counterpart = difference.a, difference.b
    calls, suspects = _suspects(operation.file, operation.line)
    ahead = [*suspects, "order"] if operation.in_loader else suspects
    base = operation.name.removeprefix("aten.")
    if difference.how == "results" and operation.is_random:
        source = "a torch.Generator of its own" if operation.has_generator else "PyTorch's global generator"
        drawn = "dropout draws" if _DROPOUT.search(base) else "it draws"
        drawn = "a data loader draws its order" if operation.in_loader else drawn
        kept = ["kept"] if operation.has_generator else []
        return f"{drawn} from {source}, which is not in the same state in both runs", [
            *ahead,
            *kept,
            "seeds",
            "kept",
        ]
    if difference.how == "results":
        words = f"{base} makes other bits of equal operands{calls}"
        if base == operation.name:
            words = f"{base} makes other bits of equal operands; its kernel is not PyTorch's{calls}"
        elif _ATOMICS.search(base):
            words = f"{base} adds with atomics on CUDA, in an order that differs from run to run"
        return words, [*ahead, "atomics", "threads"]
    words = (
        "what it was given comes from outside the recorded operations: Python, numpy, another thread or process,"
        " unwritten memory, or an earlier batch"
    )
    if difference.how == "numbers" and counterpart is not None:
        words = f"Python gives it another number, {operation.numbers} against {counterpart.numbers}"
    elif difference.how == "path":
        name = (
            "nothing"
            if counterpart is None
            else f"{counterpart.name} at {counterpart.file}:{counterpart.line}"
        )
        words = f"the other run does {name} here: Python takes another branch"
    return f"{words}{calls}", [*ahead, "kept", "seeds", "order", "time"]


def _suspects(file: str, line: int) -> tuple[str, list[str]]:
    """Return, for a sentence, the calls before a line of a function that may differ, and the trials for them."""
    found, trials = [], []
    for at in range(line, max(line - _LINES, 0), -1):
        code = linecache.getline(file, at).partition("#")[0]
        for pattern, trial in _SUSPECTS.items():
            if match := re.search(pattern, code):
                words = re.sub(r"\($", "()", match.group().strip())
                found.append(f"{words} in line {at}")
                trials += [trial] if trial else []
        if re.match(r"\s*(?:async )?def ", code):
            break
    return (f"; look at {', '.join(found[:3])}" if found else ""), list(dict.fromkeys(trials))
