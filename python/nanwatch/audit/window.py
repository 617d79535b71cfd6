"""Window of an audit: calls, backwards at a few weights, clips and reductions between two audited steps.

A hook on a leaf runs before its gradient is added to `.grad`. The hooks are there from one audited step to the next,
and read only whether `.grad` holds something by then. Between audited steps the window is closed.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import sqrt
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles
from ..instrumentation.grad_scaler import find_scaler
from ..numerics._extension import instances_of
from ..numerics.readable import only_our_dispatch
from ..recording.events import Event, Recorder
from ..records.record import Frame
from ..util.place import Place
from ..util.visible import suppressed, users_frame
from .samples import Key, each_weight, is_full, number, plain

_MOST_CALLS, _MOST_CLIPS = 8192, 64
_PROBES = 6  # small weights, besides those that the audit asks for
_MOST_ASKED = 16
_MAX_OPERATIONS = 16  # that a loss is followed through
_MEAN = 1  # the reduction of a loss, as the nodes of PyTorch's losses keep it
Values = tuple[object, ...]  # shape, least and largest magnitude


def place_of(frame: FrameType | None) -> Place | None:
    """Return the line of the user's that this frame was called from."""
    user = users_frame(frame)
    return None if user is None else Place(user.f_code.co_filename, user.f_lineno)


class Call(NamedTuple):
    """One recorded call of a module in grad mode, as far as the audit needs it."""

    module: str
    inputs: frozenset[Values]
    outputs: frozenset[Values]
    is_empty: bool  # called with a tensor without elements


def call_of(frame: Frame) -> Call:
    """Return what the audit needs of a frame."""
    sides: dict[str, set[Values]] = {"input": set(), "output": set()}
    is_empty = False
    for record in frame.records:
        if record.role in sides and record.shape is not None:
            sides[record.role].add((record.shape, record.abs_min, record.abs_max))
            is_empty = is_empty or (record.role == "input" and 0 in record.shape)
    return Call(frame.name, frozenset(sides["input"]), frozenset(sides["output"]), is_empty)


class Clip(NamedTuple):
    """One call of clip_grad_norm_: its weights, the most that it was to leave, the norm before and after it, its line.

    `at_step` is the norm of the same gradients when a step takes them.
    """

    weights: tuple[weakref.ref[Tensor], ...]
    max_norm: float
    total: float
    norm: float
    place: Place | None
    at_step: float = 0.0


def norm_of(weights: Iterable[weakref.ref[Tensor]]) -> float:
    """Return the 2-norm of the gradients of these weights."""
    gradients = [x.grad for reference in weights if (x := reference()) is not None and x.grad is not None]
    values = [readable for x in gradients if (readable := plain(x)) is not None]
    if not values:
        return 0.0
    with torch.no_grad(), only_our_dispatch():
        norms = torch._foreach_norm(values, 2.0, dtype=torch.float32)
        return sqrt(sum(float(norm) ** 2 for norm in norms))


class Backward(NamedTuple):
    """One run of the autograd engine: its line, the latest batch, and the numbers that its loss was multiplied by.

    `elements` is the number that the loss is a mean over, where the loss knows it. `num_steps` counts the steps of all
    optimizers before it.
    """

    place: Place | None = None
    batch: int = -1
    factors: tuple[float, ...] = ()
    elements: float | None = None
    num_steps: int = 0


class Arrival(NamedTuple):
    """Gradient that came to a weight: whether `.grad` held something before, and whether it is other than 0."""

    backward: Backward
    was_full: bool
    is_full: bool


@dataclass(slots=True, eq=False)
class Probe:
    """A weight with a hook, and the gradients that came since the latest step of its optimizer."""

    key: Key
    weight: weakref.ref[Tensor]
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def is_stale(self) -> bool:
        """Return whether `.grad` holds gradients of before the latest step, or of another optimizer's backward."""
        arrivals = self.arrivals
        if arrivals and all(arrival.was_full for arrival in arrivals):
            return True
        return any(
            late.was_full and early.backward.place != late.backward.place and _has_stepped(early, late)
            for early, late in pairwise(arrivals)
        )

    @property
    def resets(self) -> int:
        """Return how often `.grad` was emptied after a backward, and before the next."""
        return sum(not arrival.was_full for arrival in self.arrivals[1:])


def _has_stepped(early: Arrival, late: Arrival) -> bool:
    return early.backward.num_steps < late.backward.num_steps


# Functions of PyTorch without a hook. Each ends in a function that it looks up in its module at every call.
class Tap:
    """Wrapper of one function of a module. Listeners have a method that gets its arguments, before or after it ran."""

    def __init__(self, module: Any, name: str, method: str, *, is_before: bool) -> None:
        self._module = module
        self._name = name
        self._method = method
        self._is_before = is_before
        self._lock = threading.Lock()
        self._listeners: list[weakref.ref[Any]] = []

    def add(self, listener: object) -> None:
        """Call the listener's method, as long as it lives or until `remove`."""
        with self._lock:
            self._listeners.append(weakref.ref(listener))
            original = getattr(self._module, self._name, None)
            if original is not None and not hasattr(original, "_nanwatch"):
                setattr(self._module, self._name, self._wrapped(original))

    def remove(self, listener: object) -> None:
        """Call it no more. With the last listener PyTorch's function is there again."""
        with self._lock:
            self._listeners = [
                reference for reference in self._listeners if reference() not in (None, listener)
            ]
            original = getattr(getattr(self._module, self._name, None), "_nanwatch", None)
            if not self._listeners and original is not None:
                setattr(self._module, self._name, original)

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            if self._is_before:
                self._tell(args, kwargs)
            result = original(*args, **kwargs)
            if not self._is_before:
                self._tell(args, kwargs)
            return result

        call._nanwatch = original  # type: ignore[attr-defined]
        return call

    def _tell(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            for reference in list(self._listeners):
                if (listener := reference()) is not None:
                    getattr(listener, self._method)(*args, **kwargs)
        except Exception:
            suppressed(f"a call of {self._name} could not be audited")


_TAPS = (
    Tap(torch.autograd, "backward", "backward_starts", is_before=True),
    Tap(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", "clipped", is_before=False),
    Tap(torch.distributed, "all_reduce", "reduced", is_before=True),
)


class Window:
    """Gatherer for the audits of a model."""

    def __init__(self, recorder: Recorder) -> None:
        self.num_calls = 0
        self.probes: list[Probe] = []
        self._recorder = recorder
        self._calls: deque[Call] = deque(maxlen=_MOST_CALLS)
        self._clips: deque[Clip] = deque(maxlen=_MOST_CLIPS)
        self._batches: deque[int] = deque(maxlen=256)  # in grad mode
        self.num_steps = 0  # of all optimizers
        self._asked: set[Key] = set()
        self._hooks: Handles | None = None
        self._next: Backward | None = None
        # By the number of the engine's run. None for one of torch.autograd.grad, which adds to no `.grad`.
        self._backwards: dict[int, Backward | None] = {}
        self._reduced: deque[tuple[weakref.ref[Tensor], weakref.ref[Any]]] = deque(maxlen=_MOST_CALLS)
        self._frames = recorder.subscribe(Event.FRAME)
        for tap in _TAPS:
            tap.add(self)

    def close(self) -> None:
        """Gather nothing until `renew`."""
        self._frames.active = False
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks, self.probes = None, []
        self._asked.clear()
        self._calls.clear()
        self._reduced.clear()

    def remove(self) -> None:
        """Close for good."""
        self.close()
        for tap in _TAPS:
            tap.remove(self)

    def renew(self, optimizer: Optimizer, model: nn.Module, asked: Collection[Key]) -> None:
        """Open, and forget the backwards and clips before a step of this optimizer.

        Those weights in `asked` that have no hook get one.
        """
        self._frames.active = True
        weights = ids_of(optimizer)
        for probe in self.probes:
            if id(probe.weight()) in weights:
                probe.arrivals.clear()
        self._clips.clear()
        self._reduced.clear()
        self._backwards.clear()
        if self._hooks is None or not self._asked.issuperset(asked):
            self._asked.update(asked)
            self._set_hooks(model)

    def _set_hooks(self, model: nn.Module) -> None:
        """Leave hooks on the smallest trained weights, the largest, the first, the last and those asked for."""
        if self._hooks is not None:
            self._hooks.remove()
        before = {probe.key: probe for probe in self.probes}
        leaves = [
            ((module, label), x)
            for module, label, x in each_weight(model)
            if x.requires_grad and x.is_leaf and x.numel()
        ]
        small = sorted(leaves, key=lambda leaf: leaf[1].numel())
        chosen = [leaf for leaf in leaves if leaf[0] in self._asked][:_MOST_ASKED]
        # The first and the last have often different optimizers, as the parts of a GAN.
        weights = dict([*small[:_PROBES], *small[-1:], *leaves[:1], *leaves[-1:], *chosen])
        self.probes = [before.get(key, Probe(key, weakref.ref(x))) for key, x in weights.items()]
        hooks = [
            x.register_hook(_Hook(weakref.ref(self), probe))
            for probe, x in zip(self.probes, weights.values(), strict=True)
        ]
        self._hooks = Handles(self, hooks)

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call."""
        if self._frames.active and frame.phase == "forward" and frame.batch in self._batches:
            self._calls.append(call_of(frame))
            self.num_calls += 1

    def batch_started(self, model: nn.Module, batch: int) -> None:
        """Take the start of a batch in grad mode."""
        if self._frames.active:
            self._batches.append(batch)
            if self._hooks is None:
                self._set_hooks(model)

    def backward_starts(self, tensors: object, *_: object, **__: object) -> None:
        """Take a call of `Tensor.backward`, before it frees its graph."""
        if self._hooks is not None:
            place, batch = place_of(sys._getframe(1)), self._recorder.latest_batch
            node = tensors.grad_fn if isinstance(tensors, Tensor) else None
            self._next = Backward(place, batch, *_scaling(node), self.num_steps)

    def arrived(self, probe: Probe, gradient: Tensor) -> None:
        """Take a gradient that is about to be added to a probe's `.grad`."""
        task, x = torch._C._current_graph_task_id(), probe.weight()
        if task not in self._backwards:
            self._backwards[task], self._next = self._next, None
        backward = self._backwards[task]
        if x is not None and task != -1 and backward is not None:
            with torch.no_grad(), only_our_dispatch():
                probe.arrivals.append(Arrival(backward, is_full(x.grad), is_full(gradient)))

    def clipped(self, parameters: Any, max_norm: Any, total: Any = 0.0, *_: object, **__: object) -> None:
        """Take a call of clip_grad_norm_."""
        if self._frames.active:
            weights = parameters if isinstance(parameters, list | tuple) else [parameters]
            references = tuple(weakref.ref(x) for x in weights)
            place, before = place_of(sys._getframe(1)), number(total) or 0.0
            self._clips.append(Clip(references, float(max_norm), before, norm_of(references), place))

    def reduced(self, tensor: Tensor, op: object = None, group: Any = None, *_: object, **__: object) -> None:
        """Take a call of torch.distributed.all_reduce. A group of None is that of all ranks."""
        if self._frames.active and group is not None:
            self._reduced.append((weakref.ref(tensor), weakref.ref(group)))

    def group_sizes(self) -> dict[int, int]:
        """Return the number of ranks over which a tensor was reduced, by the tensor's id."""
        return {
            id(x): group.size()
            for tensor, reference in self._reduced
            if (x := tensor()) is not None and (group := reference()) is not None
        }

    def clips(self, optimizer: Optimizer) -> list[Clip]:
        """Return the clips with the norms that the step is about to take: of all, for a clip of nothing."""
        weights = [weakref.ref(x) for group in optimizer.param_groups for x in group["params"]]
        return [clip._replace(at_step=norm_of(clip.weights or weights)) for clip in self._clips]

    def calls_since(self, count: int) -> list[Call]:
        """Return the calls after the first `count`."""
        return list(islice(self._calls, max(0, len(self._calls) - (self.num_calls - count)), None))


class _Hook:
    def __init__(self, window: weakref.ref[Window], probe: Probe) -> None:
        self._window = window
        self._probe = probe

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None or is_compiling() or (window := self._window()) is None:
            return
        try:
            window.arrived(self._probe, gradient)
        except Exception:
            suppressed("a backward could not be audited")


def _scaling(node: Any) -> tuple[tuple[float, ...], float | None]:
    """Return what a loss was multiplied with after it was reduced, and over how many elements it is a mean."""
    factors: list[float] = []
    for _ in range(_MAX_OPERATIONS):
        kind = "" if node is None else node.name()
        terms = [function for function, _ in node.next_functions if function is not None] if kind else []
        if kind in ("MulBackward0", "DivBackward0") and len(terms) == 1:
            operands = [number(getattr(node, name, None)) for name in ("_saved_self", "_saved_other")]
            factor = next(filter(None, operands), 0.0)
            factors.append(factor if kind == "MulBackward0" or not factor else 1 / factor)
        elif kind not in ("ToCopyBackward0", "CloneBackward0", "ViewBackward0", "SqueezeBackward0"):
            is_mean = getattr(node, "_saved_reduction", None) == _MEAN
            return tuple(factors), number(getattr(node, "_saved_total_weight", None)) if is_mean else None
        node = terms[0]
    return tuple(factors), None


def ids_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's weights."""
    return {id(x) for group in getattr(optimizer, "param_groups", ()) for x in group["params"]}


def held_by_others(optimizer: Optimizer) -> frozenset[int]:
    """Return the ids of the weights that the other optimizers of this process hold."""
    return frozenset().union(
        *(ids_of(candidate) for candidate in instances_of(Optimizer) if candidate is not optimizer)
    )


def scale_of(factors: Sequence[float]) -> float | None:
    """Return the scale of the GradScaler in use, if a loss was multiplied with it."""
    scale = getattr(find_scaler()(), "_scale", None) if factors else None
    value = float(scale) if isinstance(scale, Tensor) else None
    is_used = value is not None and any(abs(factor - value) <= 1e-3 * value for factor in factors)
    return value if is_used else None


def is_taken_scaled(optimizer: Optimizer) -> bool:
    """Return whether a step takes gradients that nobody has divided by the scale; fused steps do so themselves."""
    if isinstance(getattr(optimizer, "grad_scale", None), Tensor):
        return False
    states = getattr(find_scaler()(), "_per_optimizer_states", {})
    stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
    return getattr(stage, "name", "READY") == "READY"
