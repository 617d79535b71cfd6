"""Snapshot of the start of a batch, from which its outermost call can be made again, and the calls an exception left.

It holds references, random states and the values of small buffers, so a batch that ends well costs a few microseconds.
After a re-run the snapshot puts back random states, buffers, training flags and the tensors of the call.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from traceback import walk_stack, walk_tb
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, jit, nn
from torch.utils.checkpoint import CheckpointFunction

from ..instrumentation.execution_context import Autocast, RngState, unwatched
from ..numerics._reference import without_repeats
from ..numerics.readable import is_plain, only_our_dispatch, unreadable
from ..precision.precision import swap_parametrizations
from ..recording.events import Start
from ..recording.walk import Unwalked, call_leaves
from ..util.program import each_module, each_parameter, frame_values, is_library, names_of
from . import isolation
from .formats import Draws

# A call changes no value of these. Configurations have attributes of the first.
_CONSTANTS = int, float, complex, str, bytes, tuple, type(None)
# A model that a watched loss is given is trusted as the watched model itself is.
_PLAIN = torch.dtype, torch.device, slice, type(...), type, nn.Module, *_CONSTANTS
# Libraries whose modules talk to other ranks.
_SHARDING = re.compile("torch.distributed|deepspeed|fairscale|megatron|colossalai|horovod|transformer_engine")
_OWN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
# Bytes of the largest buffer that is copied at the start of a batch: the statistics of 16,384 channels.
_MOST_BYTES = 1 << 16
# Seconds that each re-run may take: these, and so many times what the batch took to the failure. A child has one
# thread, in which a batch of N threads takes up to N times as long, and the reads of all results come on top.
LEAST_SECONDS, TIMES_BATCH, TIMES_THREADS = 15.0, 20.0, 4.0


# By the buffer's id: the buffer, its version and its value at a batch's start, None where it is too large to be copied.
BufferValues = Mapping[int, tuple[weakref.ref[Tensor], int, Tensor | None]]


class BufferHistory:
    """Values of a model's small buffers at the start of the present batch.

    A batch copies only buffers that were written to since the batch before, as their version counters say. The running
    statistics of PyTorch's normalisations are left out: what a training forward computes does not depend on them.
    """

    def __init__(self) -> None:
        self._num_batches = 0
        self._modules: list[weakref.ref[nn.Module]] = []
        self._values: BufferValues = {}

    def note(self, root: nn.Module) -> BufferValues:
        """Return the present values, in a mapping that never changes."""
        self._num_batches += 1
        if self._num_batches.bit_count() == 1:  # modules may have come meanwhile
            modules = (x for _, x in each_module(root) if x._buffers)
            self._modules = [weakref.ref(x) for x in modules if not getattr(x, "track_running_stats", False)]
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            with torch._C.DisableTorchFunction():  # no subclass and no function mode sees the reads
                self._values = {id(x): self._value_of(x) for _, _, x in self._buffers() if x is not None}
        return self._values

    def names(self) -> list[tuple[weakref.ref[nn.Module], str]]:
        """Return the buffers whose changes count, each by its module and name. Large ones are not copied."""
        large = {key for key, (*_, value) in self._values.items() if value is None}
        return [(module, name) for module, name, x in self._buffers() if id(x) not in large]

    def _buffers(self) -> Iterator[tuple[weakref.ref[nn.Module], str, Tensor | None]]:
        for reference in self._modules:
            if (module := reference()) is not None:
                yield from ((reference, name, x) for name, x in module._buffers.items())

    def _value_of(self, x: Tensor) -> tuple[weakref.ref[Tensor], int, Tensor | None]:
        known = self._values.get(id(x))
        if known is not None and known[0]() is x and (known[2] is None or known[1] == x._version):
            return known
        with only_our_dispatch(), torch.no_grad():
            if not is_plain(x) or x.is_inference() or unreadable(x) or x.nbytes > _MOST_BYTES:
                return weakref.ref(x), 0, None
            return weakref.ref(x), x._version, x.clone()


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The outermost call of a batch, or a call in it, as it was about to be made: `module(*args, **kwargs)`.

    `versions` are those of its tensors, `buffers` the values of the model's small buffers. `seconds`: those that a
    second run may take. `name` is that of the module in the model, where it is known. `draws` are the operations that
    draw random numbers, with their formats, as far as runs of it have come.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rng: RngState = field(default_factory=RngState.capture)
    autocast: tuple[Autocast, ...] = field(default_factory=Autocast.capture)
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    grad: bool = field(default_factory=torch.is_grad_enabled)
    versions: tuple[tuple[Tensor, int], ...] = ()
    buffers: BufferValues = field(default_factory=dict)
    seconds: float = LEAST_SECONDS
    name: str = ""
    draws: list[tuple[str, torch.dtype]] = field(default_factory=list)

    @classmethod
    def of(cls, start: Start) -> BatchSnapshot | None:
        """Return the start of a batch that the recorder has kept; None once its module is gone or it is not kept."""
        if start.module is None:
            return None
        buffers, others = start.extra or ({}, ())
        rng = RngState(start.generator, start.cuda, others)
        is_built = torch.backends.cuda.is_built()
        autocast = tuple(Autocast(*mode) for mode in start.autocast if mode[0] == "cpu" or is_built)
        modes = autocast, start.inference, start.grad
        seconds = LEAST_SECONDS + max(TIMES_BATCH, TIMES_THREADS * torch.get_num_threads()) * start.elapsed
        call = start.module, start.args, start.kwargs or {}
        return cls(*call, rng, *modes, tuple(start.versions), buffers, seconds)

    @contextmanager
    def again(self) -> Iterator[Callable[[], Any]]:
        """Restore the state of the start for the block, which gets a callable that makes the call.

        It runs the model's hooks and no graph is built; compiled modules run eagerly, one operation after the other.
        Afterwards random states, buffers, training flags and the tensors of the call are as they were before, also when
        the call raises.
        """
        isolation.send()
        with ExitStack() as after:
            after.callback(begin_again(self.module, self.tensors().values(), self.buffers))
            after.callback(_put_back_others(self.module))
            after.callback(RngState.capture(others=True).restore)
            after.enter_context(unwatched(self.module))
            # The graphs of the user's cache are no part of a re-run.
            after.callback(swap_parametrizations, swap_parametrizations({}))
            after.enter_context(torch.inference_mode() if self.inference else torch.no_grad())
            after.enter_context(torch.compiler.set_stance("force_eager"))
            # Its backward refuses to give the gradients of chosen tensors.
            plain = lambda function, _, *args: function(*args)  # noqa: E731
            after.enter_context(isolation.in_place_of(CheckpointFunction, "apply", plain))
            for autocast in self.autocast:
                after.enter_context(autocast.context())
            if self.grad and torch.backends.mha.get_fastpath_enabled():
                # Without a graph nn.TransformerEncoderLayer takes a path on which its parts are not called.
                after.callback(torch.backends.mha.set_fastpath_enabled, True)
                torch.backends.mha.set_fastpath_enabled(False)
            # DistributedDataParallel would tell the other ranks that a batch has begun.
            alone = lambda replica, *args, **kwargs: replica.module(*args, **kwargs)  # noqa: E731
            after.enter_context(isolation.in_place_of(nn.parallel.DistributedDataParallel, "forward", alone))
            # A forked child has none of the threads that a collective of gloo needs.
            after.enter_context(Draws(self.draws, is_alone=_num_processes() > 1 or isolation.is_child()))
            self.rng.restore()
            after.enter_context(isolation.limited(self.seconds))
            # The class's own `__call__` is no part of the snapshot, and may wait for a lock that it holds already.
            yield lambda: nn.Module.__call__(self.module, *self.args, **self.kwargs)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the call by label."""
        return {label: x for label, x in call_leaves(self.args, self.kwargs) if isinstance(x, Tensor)}

    def doubts(self) -> list[str]:
        """Return sentences on why a second call may differ from the first; none when nothing speaks against it."""
        doubts = [f"{label} was written to, in place, since the batch began" for label in self.written()]
        for label, value in call_leaves(self.args, self.kwargs):
            if isinstance(value, Unwalked) and "belong to the caller" in value:
                source = value.partition(",")[0]
                doubts.append(f"{label} is an iterator, which the first run has consumed ({source})")
            elif not isinstance(value, (Tensor, *_PLAIN)) and not _is_constant(value):
                doubts.append(f"{label} is a {type(value).__name__}, which the first run may have changed")
        return doubts

    def written(self) -> dict[str, Tensor]:
        """Return the tensors of the call that were written to since, by label."""
        changed = {id(x) for x, version in self.versions if x._version != version}
        return {label: x for label, x in self.tensors().items() if id(x) in changed}


def _is_constant(value: object) -> bool:
    """Return whether an object has attributes, and constants alone, as a configuration has."""
    with suppress(AttributeError, TypeError):
        attributes = object.__getattribute__(value, "__dict__")  # the object itself may define another
        return bool(attributes) and all(isinstance(x, _CONSTANTS) for x in attributes.values())
    return False


def begin_again(root: nn.Module, given: Iterable[Tensor], before: BufferValues) -> Callable[[], None]:
    """Set the buffers below `root` to their values `before`. Return a function that puts back what is there now.

    It puts back buffers, training flags and the tensors that the call was `given`, and their version counters: the
    user's own call may be under way, and have saved them for its backward.
    """
    with only_our_dispatch():
        modules = [module for _, module in each_module(root)]
        flags = [(module, module.training) for module in modules]
        # Those of a ScriptModule cannot be exchanged.
        tables = [(x._buffers, dict(x._buffers)) for x in modules if not isinstance(x, jit.ScriptModule)]
        buffers = [x for module in modules for _, x in module._buffers.items() if x is not None]
        # Nothing writes to tensors without values, or whose elements share their memory.
        written = (x for x in (*buffers, *given) if not (x.is_meta or without_repeats(x)[1] > 1))
        tensors = {id(x): x for x in written}.values()
        kept = [(x, None if x.is_inference() else x._version, x.detach().clone()) for x in tensors]
        for x in buffers:
            buffer, _, value = before.get(id(x), (None, 0, None))
            if buffer is not None and buffer() is x and value is not None:
                _write(x, value, x._version)

    def put_back() -> None:
        with only_our_dispatch():
            for table, names in tables:
                if [id(x) for x in table.values()] != [id(x) for x in names.values()]:
                    table.clear()
                    table.update(names)
            for x, version, value in kept:
                # BatchNorm writes its statistics past the version counter.
                if (version is not None and x._version != version) or not torch.equal(x, value):
                    _write(x, value, version)
            for module, flag in flags:
                module.training = flag

    return put_back


def _write(x: Tensor, value: Tensor, version: int | None) -> None:
    with torch.inference_mode() if version is None else nullcontext(), torch.no_grad():
        x.copy_(value)
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((x,), (version,))


def _put_back_others(root: nn.Module) -> Callable[[], None]:
    """Keep the state of each module outside the tree that this thread calls. Return a function that puts it back.

    Code that runs again may call modules that only its closures and globals hold, as a frozen teacher in train mode.
    """
    owner, known, after = threading.get_ident(), {id(x) for x in root.modules()}, ExitStack()

    def keep(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == owner and id(module) not in known:
            known.update(id(x) for x in module.modules())
            after.callback(begin_again(module, (), {}))

    after.callback(nn.modules.module.register_module_forward_pre_hook(keep).remove)
    return after.close


def _num_processes() -> int:
    """Return the number of processes of the job, 0 without a job."""
    job = torch.distributed
    return job.get_world_size() if job.is_available() and job.is_initialized() else 0


def no_second_run(root: nn.Module) -> str:
    """Return in words why no batch can be re-run here and now; else "".

    In a job of several processes one can where `root` computes alone, as a replica of DistributedDataParallel does.
    """
    number = _num_processes()
    if number > 1:
        # A collective that the model's own code calls is refused when it comes; see `Draws`.
        modules = [x for x in root.modules() if not isinstance(x, nn.parallel.DistributedDataParallel)]
        made_by = {kind.__module__ for module in modules for kind in type(module).__mro__}
        # FSDP leaves weights whose memory is gone until the next forward.
        tensors = (*root.parameters(), *root.buffers())
        is_sharded = any(type(x) not in _OWN_TENSORS or unreadable(x) for x in tensors)
        if is_sharded or any(map(_SHARDING.match, made_by)):
            return f"in a job of {number} processes it would wait for the others"
    weights = (x for x in each_parameter(root) if x.device.type == "cpu" and is_plain(x))
    if any(x.is_shared() for x in weights if not unreadable(x)):
        return "its weights lie in memory that other processes share"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace is recording"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "it runs inside a torch.func transform"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def draws_outside_torch(root: nn.Module) -> bool:
    """Return whether code beside the model's forwards mentions `random`: Python's or NumPy's generator.

    Noting the states of both takes 40 µs a batch.
    """
    names = {type(module).__module__ for _, module in each_module(root)}
    modules = [sys.modules[name] for name in names if name in sys.modules]
    members = members_of(x for x in modules if not is_library(getattr(x, "__file__", None) or "<program>"))
    return any("random" in names_of(x.__code__) for x in members if isinstance(x, FunctionType))


def members_of(modules: Iterable[ModuleType]) -> list[Any]:
    """Return what modules of Python hold, and the members of their classes."""
    members = [value for module in modules for value in list(vars(module).values())]
    return members + [x for kind in members if isinstance(kind, type) for x in list(vars(kind).values())]


# The methods of PyTorch's that run a watched module's wrapper, and its hooks and forward.
_WRAPPED_CALL = nn.Module._wrapped_call_impl.__code__
_CALL = nn.Module._call_impl.__code__


class LeftCall(NamedTuple):
    """A call that an exception left, or that is under way. `output` is () where the forward had not returned.

    Such a call has no frame, as the recorder sees a call when it returns. Its module, its arguments and, where a
    hook raised after the forward, its output are still in the frames of the traceback.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @classmethod
    def of(cls, frame: FrameType) -> LeftCall:
        """Return the call that a frame of PyTorch's makes."""
        values = frame_values(frame)
        output = values.get("result")
        return cls(values["self"], values["args"], values["kwargs"], () if output is None else output)


def open_calls(frame: FrameType | None = None) -> list[LeftCall]:
    """Return the module calls under way in this thread, the innermost first, read from its stack.

    The innermost may have returned to the wrapper that records it. `frame` is the innermost of another stack.
    """
    return [LeftCall.of(x) for x, _ in walk_stack(frame or sys._getframe(1)) if x.f_code is _WRAPPED_CALL]


def left_calls(error: BaseException) -> list[LeftCall]:
    """Return the module calls that the exception left, the innermost first."""
    frames = list[FrameType]()
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is _CALL:
            if frames and all(above is not frames[0] for above, _ in walk_stack(frame)):
                break  # of an exception that is raised once more: these calls are of the time before
            frames.insert(0, frame)
    return [*map(LeftCall.of, frames)]
