"""Batches, calls, backwards and peaks, as PythonRecorder keeps them. The compiled part has its own of each."""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    leaf_hooks: ExitStack = field(default_factory=ExitStack)  # they outlive the graph

    def __del__(self) -> None:
        if "leaf_hooks" in vars(self):  # not where its making met the limit of recursion
            self.leaf_hooks.close()


@dataclass
class Backward:
    """Gradients that came in one run of the autograd engine."""

    end: weakref.ref[Any]  # the callback at its end, which is gone if an exception has ended it
    # The third item is the gradient's place, tensor and version. One gradient may come to several calls in turn.
    arrivals: list[tuple[Call, Part, object, Record]] = field(default_factory=list)
    weights: set[object] = field(default_factory=set)

    @property
    def has_fault(self) -> bool:
        """Whether a gradient so far is not finite, and not meant to be so."""
        return any(record.is_fault for *_, record in self.arrivals)

    def frames(self) -> tuple[list[BackwardCall], list[Arrival]]:
        """Return the calls with their frames, a parent after its children as in the forward, and the arrivals."""
        # A call is done when it and all calls in it had their last gradient.
        records: dict[Call | None, list[Record]] = {call: [] for call, *_ in self.arrivals}
        done: dict[Call, int] = {}
        places: list[tuple[Call, tuple[int, Part, int]]] = []
        time, latest = 0, None
        for position, (call, part, gradient, record) in enumerate(self.arrivals):
            time, latest = time + (gradient != latest), gradient
            places.append((call, (len(records[call]), part, time)))
            records[call].append(record)
            around: Call | None = call
            while around is not None and around in records:
                done[around] = position
                around = around.caller
        calls = sorted(done, key=lambda call: (done[call], call.number))
        positions: dict[Call | None, int] = {call: position for position, call in enumerate(calls)}
        ended = []
        for call in calls:
            frame = call.frame._replace(records=tuple(records[call]), phase="backward")
            ended.append(BackwardCall(frame, positions.get(call.caller), call.number))
        return ended, [Arrival(positions[call], *place) for call, place in places]


def place_of(x: Any) -> tuple[Any, ...] | None:
    """Return the place of a tensor in the graph: an output of a node, or a leaf's own; None where hooks see nothing."""
    if not issubclass(type(x), Tensor) or not x.requires_grad or x.is_meta:
        return None
    if unreadable(x).startswith("inside a functorch transform"):
        return None
    try:
        return ("leaf", id(x)) if x.grad_fn is None else (x.grad_fn._sequence_nr(), x.output_nr)
    except RuntimeError:
        # One of several views, as unbind gives them, after their base was written into: it has no graph any more, and
        # autograd refuses each use of it.
        return None


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
