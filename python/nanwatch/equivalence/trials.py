"""Causes of runs that part, and trials: changes of a run's surroundings that take one source of chance away each.

`explain` knows causes by the operation in which runs part. A run that becomes repeatable under a trial has shown its
cause. Trials that replace a function note who called it.
"""

from __future__ import annotations

import ast
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
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..diagnosis.provenance import program_frame
from ..util.place import Place
from ..util.program_code import SKIPPED_FILES, is_library
from .operations import OUTSIDE, UNWRITTEN, OperationDifference
from .state import temporarily

Note = Callable[[str], object]
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_START = 1_700_000_000.0
# Parameters of a DataLoader that one without workers refuses.
_OF_WORKERS = "num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"


@dataclass(frozen=True)
class Trial:
    """Change of a run's surroundings.

    `change` is what to write into the program, as code where that is possible. `cause` is what it shows when the runs
    become equal, with the noted calls behind it. `patch(note)` is the context of the run, and `environment` that of its
    process. `for_scripts`: it makes sense only for runs in processes of their own.
    """

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
def _ordered_loaders(note: Note) -> Iterator[None]:
    """Make data loaders without workers, whose samplers have generators with the seed 0."""
    before = DataLoader.__init__
    parameters = signature(before)

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        given = parameters.bind(self, *args, **kwargs).arguments
        for name in _OF_WORKERS:
            given.pop(name, None)
        samplers: list[Any] = [given.get("sampler"), getattr(given.get("batch_sampler"), "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "generator"):
                sampler.generator = torch.Generator().manual_seed(0)
        note_call("a DataLoader", note)
        before(**{**given, "generator": torch.Generator().manual_seed(0)})

    with temporarily(partial(setattr, DataLoader, "__init__"), init, before):
        yield


def note_call(name: str, note: Note) -> None:
    """Note that the program has called a function, and where, unless one of its libraries or an import has."""
    frame = program_frame(None)
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
    new = {id(old): one for old, one in functions}
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
        "torch.manual_seed(0), random.seed(0), numpy.random.seed(0) at the start",
        "the global random number generators, which the program does not seed",
        _seeded,
        for_scripts=True,
    ),
    "loader": Trial(
        "DataLoader(generator=torch.Generator().manual_seed(0), num_workers=0)",
        "the order or the workers of a data loader",
        _ordered_loaders,
        for_scripts=True,
    ),
    "hash": Trial(
        "PYTHONHASHSEED=0",
        "the order of a set, or another use of hash(), which Python seeds anew in each process",
        environment={"PYTHONHASHSEED": "0"},
        for_scripts=True,
    ),
    "clock": Trial(
        "the clocks of the module time moved on by 1 ms a call",
        "a time that the program reads",
        _stopped_clock,
    ),
    "entropy": Trial(
        "fixed seeds in place of the operating system's random bytes",
        "fresh random bytes of the operating system, or a generator seeded with them",
        _no_fresh_entropy,
    ),
    "threads": Trial(
        "torch.set_num_threads(1)",
        "a sum that threads split in another way in each run",
        lambda note: temporarily(torch.set_num_threads, 1, torch.get_num_threads()),
        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    ),
    "deterministic": Trial(
        "torch.use_deterministic_algorithms(True)",
        "an operation for which PyTorch has a deterministic kernel, or memory that torch.empty leaves unwritten",
        _deterministic,
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
}


# From the list at torch.use_deterministic_algorithms: operations whose CUDA kernels add with atomics.
_ATOMICS = re.compile(
    r"index_add|scatter|index_put|index_copy|put_|histc|bincount|cumsum|embedding.*backward|grid_sample|upsample"
    r"|interpolate|adaptive_.*backward|max_pool.*backward|max_unpool|reflection_pad|replication_pad|ctc_loss"
    r"|nll_loss2d|kthvalue|median|segment_reduce|repeat_interleave"
)
_TUNED = re.compile(r"conv|mm|matmul|linear|baddbmm|attention|rnn|lstm|gru")
# Calls in the source of a function whose results differ from run to run, and the trials that hold them still.
_SUSPECTS = {
    r"\btime\.\w+\(|\b(?:perf_counter|monotonic)(?:_ns)?\(|datetime\.\w*now\(": "clock",
    r"\b(?:urandom|uuid4|SystemRandom)\(|\bsecrets\.\w+\(|(?:default_rng|\bRandom|\.seed)\(\s*\)": "entropy",
    r"(?<![\w.])hash\(|(?<![\w.])(?:frozen)?set\(|\{[^:{}]+ for ": "hash",
    r"(?<![\w.])id\(": "",
    r"\bas_completed\(|\bThread\(|\.submit\(|imap_unordered\(": "",
    r"\blistdir\(|\bscandir\(|\biglob\(|(?<![\w])glob\(": "",
}


def explain(found: OperationDifference) -> tuple[str, list[str]]:
    """Return the cause of a difference in one sentence, and the names of the trials to make first."""
    one = found.a
    operand = found.operand
    calls, trials = _suspects(one.place)
    ahead = ["loader"] if one.in_loader else []
    if found.how == "results" and one.is_random:
        return _of_random(one.has_generator, one.in_loader), [
            "seeds",
            *trials,
            "kept",
            *ahead,
            "entropy",
            "clock",
        ]
    if found.how == "results":
        return _of_results(one.name, calls), ["deterministic", "threads", *trials]
    if found.how == "operands" and operand.origin == UNWRITTEN:
        cause = f"it reads memory that was allocated at {operand.allocated} and that no operation wrote"
        return cause, ["deterministic"]
    everything = [*ahead, *trials, "kept", "entropy", "clock", "hash", "seeds"]
    if found.how == "path":
        other = "nothing" if found.b is None else f"{found.b.name} at {found.b.place or ''}"
        return f"the other run does {other} here: Python takes another branch{calls}", everything
    if found.how == "numbers":
        theirs = "" if found.b is None else f" against {found.b.numbers}"
        return f"Python gives it another number, {one.numbers}{theirs}{calls}", everything
    if operand.origin == OUTSIDE:
        places = "Python, numpy, another thread or process, or an earlier batch"
        return f"what it was given comes from outside the recorded operations: {places}{calls}", everything
    return f"what it was given was written past PyTorch's dispatcher{calls}", everything


def _of_random(has_generator: bool, in_loader: bool) -> str:
    if in_loader:
        return "a data loader draws its order from a generator that is not seeded alike in both runs"
    if has_generator:
        return "it draws from a torch.Generator of its own, which is not in the same state in both runs"
    return "it draws from PyTorch's global generator, which is not in the same state in both runs"


def _of_results(name: str, calls: str) -> str:
    base = name.removeprefix("aten.")
    if not name.startswith("aten."):
        return f"{name} makes other bits of equal operands; its kernel is not PyTorch's{calls}"
    if _ATOMICS.search(base):
        return f"{name} adds with atomics on CUDA, in an order that differs from run to run"
    if _TUNED.search(base):
        return f"{name} may be computed by another algorithm or split over threads in another way in each run"
    return f"{name} makes other bits of equal operands"


def _suspects(place: Place | None) -> tuple[str, list[str]]:
    """Return, for a sentence, the calls in the function at `place` that may differ, and the trials for them."""
    found, trials = [], []
    file, line, _ = place or Place("", 0)
    for at in _lines_of_function(file, line):
        code = linecache.getline(file, at).partition("#")[0]
        for pattern, trial in _SUSPECTS.items():
            if match := re.search(pattern, code):
                words = re.sub(r"\($", "()", match.group().strip())
                found.append(f"{words} in line {at}")
                trials += [trial] if trial else []
    return (f"; look at {', '.join(found[:3])}" if found else ""), list(dict.fromkeys(trials))


@lru_cache(maxsize=64)
def _lines_of_function(file: str, line: int) -> tuple[int, ...]:
    """Return the lines of the innermost function around a line, or of the file without one."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return (line,) if line else ()
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    around = [span for span in spans if span[0] <= line <= span[1]]
    # The last that begins before the line is the innermost. Outside any, the 20 lines before it are enough.
    first, last = max(around, default=(max(line - 20, 1), line))
    return tuple(range(first, last + 1))
