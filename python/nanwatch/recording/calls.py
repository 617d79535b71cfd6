"""Batches, calls, backwards and peaks, as PythonRecorder keeps them. The compiled part has its own of each."""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..numerics.readable import unreadable
from ..records.record import Frame, Record, Role
from .events import Arrival, BackwardCall, Part, PeakName, Start, versions_of
from .masks import Excuses

# A model that names its outputs anew in every batch must not fill the memory: no peak is added beyond this many.
_MAX_PEAKS = 1 << 16


def start_of(
    batch: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, extra: object
) -> Start:
    """Return the start of a batch that begins now, as csrc/recorder/batch_start.h makes it."""
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
    )
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    # CUDA's generators refuse while a graph is captured.
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    cuda = tuple(x.get_state() for x in (() if is_captured else torch.cuda.default_generators))
    state = (torch.get_rng_state(), cuda, autocast, *modes, versions_of(args, kwargs))
    return Start(batch, module, args, kwargs, *state, 0.0, extra)


class Batch:
    """A batch under way, and then one that gradients may come for: its calls keep it, and the graph keeps them."""

    def __init__(self, number: int, recomputed: bool, args: Any, kwargs: Any) -> None:
        self.number, self.recomputed = number, recomputed
        self.given = args, kwargs or None  # to the outermost call, until it ends
        self.start: Callable[[], Start | None] = lambda: None  # with `keep_start`

    def keep_start(self, module: nn.Module, extra: object) -> None:
        """Keep the start, weakly its module, as a model may keep its own output."""
        kept = start_of(self.number, module, *self.given, extra)._replace(module=None)
        reference, began = weakref.ref(module), time.monotonic()
        self.start = lambda: kept._replace(module=reference(), elapsed=time.monotonic() - began)

    def forget_call(self) -> None:
        """Keep nothing of the call."""
        if (start := self.start()) is not None:
            forgotten = start._replace(module=None, args=(), kwargs=None, versions=[], extra=None)
            self.start = lambda: forgotten


@dataclass
class Node:
    """A watched module: its name, its class, and whether its calls are recorded."""

    name: str
    class_name: str
    observed: bool
    allow_inf: bool | Excuses
    has_frames: bool = False


@dataclass(eq=False)
class Call:
    """A call under way, and then one that gradients may come for: hooks in the graph keep it."""

    node: Node
    batch: Batch
    caller: Call | None
    frame: Frame
    added: list[tuple[Role, str, Any]] = field(default_factory=list)  # outputs that `add_output` gave it
    number: int = 0
    backward: int = -1  # the one that last brought a gradient of its outputs


GradientUser: TypeAlias = tuple[Call, Part, str]  # whose gradient it is, with its label


class GradientHook:
    """Hook at a place of the graph, for the calls that used the tensor there.

    At the node that made the tensor it keeps its call. At a leaf, which outlives graphs, one serves all calls.
    """

    __torch_unserializable__ = True  # torch.save() warns of any other hook

    def __init__(self, recorder: Any, place: object, x: Tensor) -> None:
        self.recorder, self.place = weakref.ref(recorder), place
        self.users: list[tuple[Callable[[], Call | None], Part, str]] = []
        self.handle: Any = x.register_hook(self)

    def __call__(self, gradient: Tensor | None) -> None:
        """Hand a gradient to the recorder."""
        # Autograd gives None for a result that nobody used, as a part of unbind, and for a Function whose backward
        # returns none. Compiled autograd would follow this hook into code that it cannot compile.
        if gradient is not None and not is_compiling() and (recorder := self.recorder()) is not None:
            users = [(call_of(), part, label) for call_of, part, label in self.users]
            recorder.take_gradient(gradient, self.place, [user for user in users if user[0] is not None])


def leaf_hook(leaf: Tensor, recorder: object) -> GradientHook | None:
    """Return the recorder's hook at a leaf, if it has one."""
    hooks = (x for x in (leaf._backward_hooks or {}).values() if isinstance(x, GradientHook))
    return next((x for x in hooks if x.recorder() is recorder), None)


def place_of(x: Any) -> tuple[Any, ...] | None:
    """Return the place of a tensor in the graph: an output of a node, or a leaf's own; None where hooks see nothing."""
    is_followed = issubclass(type(x), Tensor) and x.requires_grad and not x.is_meta
    if not is_followed or unreadable(x).startswith("inside a functorch transform"):
        return None
    try:
        return ("leaf", id(x)) if x.grad_fn is None else (x.grad_fn._sequence_nr(), x.output_nr)
    except RuntimeError:
        # One of several views, as unbind gives them, after their base was written into: it has no graph any more, and
        # autograd refuses each use of it.
        return None


class Backward:
    """Gradients that came in one run of the autograd engine: their calls, parts, times and records."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = weakref.ref(end)  # the callback at its end, which is gone if an exception has ended it
        self.has_fault = False  # a gradient so far is not finite
        self._arrivals: list[tuple[Call, Part, int, Record]] = []
        self._time = 0
        self._latest: object = None

    def add(self, gradient: object, users: list[GradientUser], record: Record) -> None:
        """Add a gradient for each of its users. It is known by place, tensor and version: it may come to more hooks."""
        self._time, self._latest = self._time + (gradient != self._latest), gradient
        self.has_fault |= record.is_fault
        for call, part, label in users:
            self._arrivals.append((call, part, self._time, record._replace(label=label)))

    def frames(self) -> tuple[list[BackwardCall], list[Arrival]]:
        """Return the calls with their frames, a parent after its children as in the forward, and the arrivals."""
        records: dict[Call | None, list[Record]] = {call: [] for call, *_ in self._arrivals}
        # A call is done when it and all calls in it had their last gradient.
        done: dict[Call, int] = {}
        for position, (call, *_) in enumerate(self._arrivals):
            around: Call | None = call
            while around is not None and around in records:
                done[around] = position
                around = around.caller
        calls = sorted(done, key=lambda call: (done[call], call.number))
        positions: dict[Call | None, int] = {call: position for position, call in enumerate(calls)}
        arrivals = []
        for call, part, when, record in self._arrivals:
            arrivals.append(Arrival(positions[call], len(records[call]), part, when))
            records[call].append(record)
        ended = []
        for call in calls:
            frame = call.frame._replace(records=tuple(records[call]), phase="backward")
            ended.append(BackwardCall(frame, positions.get(call.caller), call.number))
        return ended, arrivals


class Peaks(dict[PeakName, float]):
    """The largest magnitude of each tensor of a batch, or of each gradient of several backwards."""

    batch = -1
    num_taken = 0  # names, in the order in which they came

    def add(self, frame: Frame, with_inputs: bool = True) -> None:
        """Take the finite records of a frame: reports have the others. The forward of another batch begins anew."""
        if frame.phase == "forward" and frame.batch != self.batch:
            self.update(dict.fromkeys(self, 0.0))
        self.batch = max(self.batch, frame.batch) if frame.phase == "backward" else frame.batch
        for record in frame.records:
            name = (frame.name, record.label, record.dtype)
            is_known = name in self or (len(self) < _MAX_PEAKS and record.ends is not None)
            is_meant = record.is_excused or (record.role == "input" and not with_inputs)
            if record.isfinite and is_known and not is_meant:
                self[name] = max(self.get(name, 0.0), record.abs_max or 0.0)

    def take(self) -> tuple[int, list[PeakName], bytes]:
        """Return `(batch, new, values)`, and forget the peaks; see PythonRecorder.take_peaks."""
        batch, new, values = self.batch, list(self)[self.num_taken :], array("d", self.values())
        self.batch, self.num_taken = -1, len(self)
        self.update(dict.fromkeys(self, 0.0))
        return batch, new, values.tobytes()
