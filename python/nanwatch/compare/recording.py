"""Process of one run that `nanwatch twice` compares: trials that change it, and the recording of what it computes.

A trial takes one source of chance away. A run that becomes repeatable under a trial has shown its cause. Trials that
replace a function note who called it. The recording has the fingerprint of each tensor that modules and optimizers
pass on.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
import timeit
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone, tzinfo
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ..instrumentation import slot
from ..instrumentation.execution_context import TemporaryWrapper
from ..instrumentation.global_hooks import after_steps, before_steps
from ..numerics.ranges import fingerprint
from ..numerics.readable import dtype_name
from ..recording.walk import call_leaves, leaves
from ..util.messages import module_name, spell, users_frame, visible
from ..util.program import each_module, is_library, when_imported

# Trials.

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_START = 1_700_000_000 * 10**9
# Calls of this process that a trial has replaced, and what puts the functions back.
_notes: list[str] = []
_undoes = ExitStack()


class Trial(NamedTuple):
    """Change of a run's surroundings: by `patch()`, before the program is imported, and by its `environment`.

    `change` is what to write into the program, as code where that is possible. `cause` is what it shows when the runs
    become equal, with the noted calls behind it.
    """

    change: str
    cause: str
    patch: Callable[[], object]
    environment: Mapping[str, str] = {}


def _replace(owner: Any, name: str, function: Callable[..., Any], *seed: object) -> None:
    """Replace a function of a module or class. Calls that bring no argument, or None, are noted and get `seed`."""
    is_method = isinstance(owner, type)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args[is_method:], *kwargs.values()]
        if name.endswith("urandom") or not given or given[0] is None:
            _note_call(f"{owner.__name__}.{name}()")
            args, kwargs = (*args[:is_method], *seed) or args, {}
        return function(*args, **kwargs)

    _undoes.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, call)


def _replace_methods(kind: type, **methods: object) -> None:
    """Replace methods of a class that refuses a change. Libraries know it by its memory, so a subclass will not do."""
    members = gc.get_referents(vars(kind))[0]
    forget_methods = partial(ctypes.pythonapi.PyType_Modified, ctypes.py_object(kind))
    _undoes.callback(forget_methods)
    _undoes.callback(members.update, {name: members[name] for name in methods})
    members.update(methods)
    forget_methods()


def _note_call(name: str) -> None:
    """Note that the program has called a function, and where, unless one of its libraries or an import has."""
    frame = users_frame(sys._getframe(1))
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and not is_library(frame.f_code.co_filename):
        _notes.append(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")


def _seed() -> None:
    """Seed the global generators, give 0 where no seed is, and fixed bytes for the operating system's random ones."""
    torch.manual_seed(0)
    _replace_methods(torch.Generator, seed=_seed_by_number)  # torch.seed() calls it too
    for module, names in ((random, ("seed",)), (sys.modules.get("numpy.random"), ("seed", "default_rng"))):
        for name in names if module is not None else ():
            getattr(module, name)(0)
            _replace(module, name, getattr(module, name), 0)
    for module, name in ((os, "urandom"), (random, "_urandom")):  # the latter is SystemRandom's
        _replace(module, name, random.Random(0).randbytes)
    _replace(random.Random, "seed", random.Random.seed, 0)


def _seed_by_number(generator: torch.Generator) -> int:
    _note_call("torch.Generator.seed()")
    return generator.manual_seed(0).initial_seed()


def _stop_clocks() -> None:
    """Let each clock of time and datetime advance by 1 ms a call, from the same moment in each run."""
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        # A counter for each: threads of libraries, which ask one clock, do not move the others.
        now = itertools.count(_START, 1_000_000).__next__
        _replace(time, f"{name}_ns", now)
        _replace(time, name, lambda now=now: now() / 1e9)
    # PyTorch has imported timeit, which has perf_counter by a name of its own.
    _replace(timeit, "default_timer", itertools.count(_START / 1e9, 1e-3).__next__)
    for name in ("localtime", "gmtime", "ctime"):
        _replace(time, name, getattr(time, name), _START / 1e9)
    moments = itertools.count(_START / 1e9, 1e-3)

    def read(kind: type[datetime], tz: tzinfo | None = None) -> datetime:
        _note_call("datetime.now()")
        return kind.fromtimestamp(next(moments), tz)

    utcnow = classmethod(lambda kind: read(kind, timezone.utc).replace(tzinfo=None))
    _replace_methods(datetime, now=classmethod(read), utcnow=utcnow)  # these two ask the system's clock


def _order_data() -> None:
    """Make data loaders without workers, whose samplers have generators with the seed 0."""
    before = DataLoader.__init__

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        _note_call("a DataLoader")
        vars(self).update(num_workers=0, timeout=0, prefetch_factor=None, persistent_workers=False)
        self.multiprocessing_context = None
        drawing: list[Any] = [self, self.sampler, getattr(self.batch_sampler, "sampler", None)]
        for place in drawing:
            if hasattr(place, "generator"):
                place.generator = torch.Generator().manual_seed(0)

    _replace(DataLoader, "__init__", init)


def _be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


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
        "the clocks of time and datetime moved on 1 ms a call", "a time that the program reads", _stop_clocks
    ),
    "threads": Trial(
        "torch.set_num_threads(1)",
        "a sum that threads split in another way in each run",
        partial(torch.set_num_threads, 1),
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


# The recording.

_AT = {
    "weight": "before the call of {}",
    "buffer": "before the call of {}",
    "gradient": "of {}, its gradient",
    "step": "of {}, after the optimizer's step",
    "end": "of the script",
}


class TensorPrint(NamedTuple):
    """Tensor or number of a run with the fingerprint of its bits, and the thread that passed it on.

    `form` is its dtype and shape. `kind` is "weight" or "buffer" (before its module's call), "input", "output",
    "gradient" (also of a weight, before the step), "step" (a weight after it) or "end" (the exception of the run).
    """

    batch: int
    kind: str
    module: str
    class_name: str
    label: str
    form: str
    bits: int
    thread: str = ""

    @property
    def content(self) -> tuple[object, ...]:
        """The values by which two runs are compared."""
        return self.kind, self.class_name, self.label, self.form, self.bits

    @property
    def where(self) -> str:
        """The tensor in words, such as "`output` of fc1 (Linear)"."""
        named = module_name(self.module)
        if self.class_name and self.class_name != self.module:
            named += f" ({visible(self.class_name)})"
        return f"`{visible(self.label)}` {_AT.get(self.kind, 'of {}').format(named)}"


@dataclass
class Recording:
    """One run: its tensors in order, the exception that ended it, in words, and the calls that a trial has replaced."""

    tensors: list[TensorPrint] = field(default_factory=list)
    batches: int = 0
    error: str = ""
    notes: list[str] = field(default_factory=list)


class _EnoughError(BaseException):
    """Raised in the script at the start of the first batch that is not wanted. No Exception, which it might catch."""


def record(request: str, run_script: Callable[[], object]) -> int:
    """Run the script in this process, as a JSON request of `nanwatch.twice` says, and return the exit status.

    The request has the "trials" to make, "most_batches", and the "file" to which the recording is written.
    """
    wanted, process, status = json.loads(request), os.getpid(), 0
    recording = Recording(notes=_notes)
    for name in wanted["trials"]:
        TRIALS[name].patch()
    recorder = _Recorder(recording, wanted["most_batches"])
    try:
        run_script()
    except _EnoughError:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            recording.error = f"exit status {error.code}"
    except BaseException as error:
        traceback.print_exc()
        recording.error, status = spell(error), 1
    recorder.is_running = False
    _undoes.close()  # clocks that stand still may hang the exit of the process
    if recording.error:
        batch = max(recording.batches - 1, 0)
        recording.tensors.append(TensorPrint(batch, "end", "", "", "exception", recording.error, bits=0))
    if os.getpid() == process:  # else a forked child that has come to the script's end
        Path(wanted["file"]).write_text(json.dumps(vars(recording)), encoding="utf-8")
    return status


class _Recorder:
    """Recorder of the calls of all modules, the gradients of their outputs, and all optimizer steps, from now on.

    The model is the first module with parameters that the main thread calls from outside any other, else one that
    another thread so calls. Its calls are the batches; one beyond `most_batches` ends the run by _EnoughError. The
    hooks stay, as the process ends soon, and record while it `is_running`.
    """

    def __init__(self, recording: Recording, most_batches: int | None) -> None:
        self.is_running = True
        self._recording, self._most_batches = recording, most_batches
        self._model: nn.Module | None = None
        self._is_of_main = False
        self._thread = threading.local()  # has the `stack` of paths of open calls, and `steps` after a step
        # Path and class of modules; path, class and label of parameters.
        self._places = WeakIdKeyDictionary()

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return self._call(module, module._call_impl, args, kwargs)

        def call_compiled(wrapper: TemporaryWrapper, args: Any, kwargs: Any) -> Any:
            return self._call(wrapper.module, wrapper.inner or wrapper.module._call_impl, args, kwargs)

        def compile_recorded(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            compile_module(module, *args, **kwargs)
            if not slot.wrappers(module):  # what `compile` has put there comes before the default call
                slot.attach(module, TemporaryWrapper(module, call_compiled))

        compile_module, nn.Module.compile = nn.Module.compile, compile_recorded  # type: ignore[assignment]
        slot.set_default_call(call)
        # Dynamo compiles what eager code calls between two graphs too. There the slot of Python would fail.
        get = slot._PythonCallSlot._get.__code__
        when_imported("torch._dynamo", lambda: torch._dynamo.eval_frame.skip_code(get))
        before_steps.add(partial(self._add_parameters, "gradient"))
        after_steps.add(partial(self._add_parameters, "step"))

    def _may_read(self) -> bool:
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return self.is_running and not (is_traced or is_transformed or is_captured)

    def _call(self, module: nn.Module, make: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # A compiler reads this function too; to it the module is itself.
        if is_compiling() or not self._may_read():
            return make(*args, **kwargs)
        stack: list[str] = vars(self._thread).setdefault("stack", [])
        if not stack:
            self._begin(module)
        place = self._places.get(module)
        if place is None:  # made during the call of another
            class_name = type(module).__name__
            place = self._places[module] = (f"{stack[-1]}.({class_name})".lstrip("."), class_name)
        for kind, tensors in (("weight", module._parameters), ("buffer", module._buffers)):
            for label, x in tensors.items():
                if x is not None:
                    self._places[x] = (*place, label)
                    self._add(kind, (*place, label), x)
        for label, x in call_leaves(args, kwargs):
            self._add("input", (*place, label), x)
        stack.append(place[0])
        try:
            result = make(*args, **kwargs)
        finally:
            stack.pop()
        for label, x in leaves(result, "output"):
            self._add("output", (*place, label), x)
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.register_hook(partial(self._add, "gradient", (*place, label)))
        return result

    def _begin(self, module: nn.Module) -> None:
        """Begin an outermost call, which may be a batch, and name the parts of the module."""
        is_main, recording = not _thread_name(), self._recording
        is_first = self._model is None or (is_main and not self._is_of_main)
        if is_first and next(module.parameters(), None) is not None:
            self._model, self._is_of_main, recording.batches = module, is_main, 0
        if module is self._model and is_main == self._is_of_main:
            # A thread without steps may feed the main one before that calls its model. Without it the run would hang.
            if recording.batches == self._most_batches and (is_main or hasattr(self._thread, "steps")):
                raise _EnoughError
            recording.batches += 1
        outer = "" if is_main and module is self._model else type(module).__name__
        for path, part in each_module(module) if self._places.get(module) is None else ():
            if self._places.get(part) is None:
                self._places[part] = (".".join(filter(None, (outer, path))), type(part).__name__)

    def _add_parameters(self, kind: str, optimizer: Optimizer, *_: Any) -> None:
        """Add the gradients, or the weights, of an optimizer."""
        self._thread.steps = True
        for i, group in enumerate(optimizer.param_groups):
            for j, x in enumerate(group["params"]):
                place = self._places.get(x) or ("", type(optimizer).__name__, f"param_groups[{i}][{j}]")
                self._add(kind, place, x.grad if kind == "gradient" else x)

    def _add(self, kind: str, place: tuple[str, ...], value: Any) -> None:
        """Add a tensor or a number, of a module, its class and a label; anything else has no fingerprint."""
        if not isinstance(value, Tensor | bool | int | float | complex | str) or not self._may_read():
            return
        batch = max(self._recording.batches - 1, 0)
        values = batch, kind, *place, *_read(value), _thread_name()
        self._recording.tensors.append(TensorPrint._make(values))


def _thread_name() -> str:
    """Return "" in the main thread. Threads that only PyTorch knows, or of a pool, have a new number in each run."""
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else thread.name.partition("-")[0]


def _read(value: Any) -> tuple[str, int]:
    if not isinstance(value, Tensor):
        digest = blake2b(repr(value).encode(), digest_size=8).digest()
        return type(value).__name__, int.from_bytes(digest, "little")
    form = f"{dtype_name(value.dtype)} {list(value.shape)}"
    try:
        return form, fingerprint(value)
    except TypeError as error:  # meta, sparse, nested: see nanwatch.fingerprint
        return f"{form}, not compared: {spell(error)}", 0
