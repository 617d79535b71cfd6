"""Window of an audit: calls, backwards, clips and reductions between two audited steps.

A wrapper around `torch.autograd.backward` looks at each weight's `.grad` before and after it. Between audited steps the
window is closed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import sqrt
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import GlobalHooks, Handles, find_scaler
from ..numerics._extension import instances_of
from ..numerics.readable import only_our_dispatch
from ..recording.events import Event, Recorder
from ..records.record import Frame
from ..report.finding import Place
from ..util.visible import suppressing, users_frame
from .samples import Key, each_weight, ids_of, is_full, number, plain

_MOST_REDUCED, _MOST_CLIPS = 8192, 64
_MAX_OPERATIONS = 16  # that a loss is followed through
_MEAN = 1  # the reduction of a loss, as the nodes of PyTorch's losses keep it
Values = tuple[tuple[int, ...], float | None, float | None]  # shape, least and largest magnitude


def place_of(frame: FrameType | None) -> Place | None:
    """Return the line of the user's that this frame was called from."""
    user = users_frame(frame)
    return None if user is None else Place(user.f_code.co_filename, user.f_lineno)


class Call(NamedTuple):
    """The latest call of a module in grad mode: its number among all calls, its inputs, the number of its outputs."""

    number: int
    inputs: set[Values]
    num_outputs: int


class Clip(NamedTuple):
    """One call of clip_grad_norm_: its weights, the most that it was to leave, the norm before and after it, its line.

    `backwards` counts those before it. `at_step` is the norm of the same gradients when a step takes them.
    """

    weights: tuple[weakref.ref[Tensor], ...]
    max_norm: float
    total: float
    norm: float
    place: Place | None
    backwards: int
    at_step: float = 0.0

    @property
    def ids(self) -> set[int]:
        """Return the ids of its weights."""
        return {id(x) for reference in self.weights if (x := reference()) is not None}


def _norm_of(weights: Iterable[weakref.ref[Tensor]]) -> float:
    """Return the 2-norm of the gradients of these weights."""
    gradients = [x.grad for reference in weights if (x := reference()) is not None and x.grad is not None]
    values = [readable for x in gradients if (readable := plain(x)) is not None]
    if not values:
        return 0.0
    with torch.no_grad(), only_our_dispatch():
        norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in values]
        return sqrt(sum(float(norm) ** 2 for norm in norms))


class Backward(NamedTuple):
    """One run of the autograd engine: its line, the latest batch, and the numbers that its loss was multiplied by.

    `elements` is the number that the loss is a mean over, where the loss knows it. `num_steps` counts the steps of all
    optimizers before it.
    """

    place: Place | None
    batch: int
    factors: tuple[float, ...]
    elements: float | None
    num_steps: int


class Arrival(NamedTuple):
    """Gradient that came to a weight: whether `.grad` held something before, and whether it is other than 0."""

    backward: Backward
    was_full: bool
    is_full: bool


def is_stale(arrivals: Sequence[Arrival]) -> bool:
    """Return whether `.grad` holds gradients of before the latest step, or of another optimizer's backward."""
    backwards = [(early.backward, late) for early, late in pairwise(arrivals)]
    return (bool(arrivals) and all(arrival.was_full for arrival in arrivals)) or any(
        late.was_full and before.place != late.backward.place and before.num_steps < late.backward.num_steps
        for before, late in backwards
    )


def _tap(module: Any, name: str) -> GlobalHooks:
    """Return hooks of a function of PyTorch that has none. They get (args, kwargs, whether it has run).

    The function is looked up in its module at every call. It is replaced while there is a hook.
    """

    def register(call: Callable[..., Any]) -> Any:
        original = getattr(module, name, None)
        if original is None:  # a build of PyTorch without it
            return SimpleNamespace(remove=lambda: None)

        def tell(*arguments: Any) -> None:
            with suppressing(f"a call of {name} could not be audited"):
                call(*arguments)

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            tell(args, kwargs, False)
            try:
                return original(*args, **kwargs)
            finally:
                tell(args, kwargs, True)

        def restore() -> None:
            if getattr(module, name) is tapped:
                setattr(module, name, original)

        setattr(module, name, tapped)
        return SimpleNamespace(remove=restore)

    return GlobalHooks(register, traced=False)


_TAPS = {
    "backward": _tap(torch.autograd, "backward"),
    "clipped": _tap(torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
    "reduced": _tap(torch.distributed, "all_reduce"),
}


class Window:
    """Gatherer for the audits of a model."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.num_calls = 0
        self._calls: dict[str, Call] = {}
        self.num_steps = 0  # of all optimizers
        self.arrivals: dict[Key, list[Arrival]] = {}  # since the latest step of the weight's optimizer
        self._recorder = recorder
        self._model = weakref.ref(model)
        self._clips: deque[Clip] = deque(maxlen=_MOST_CLIPS)
        self._batches: deque[int] = deque(maxlen=256)  # in grad mode
        self._reduced: deque[tuple[weakref.ref[Tensor], weakref.ref[Any]]] = deque(maxlen=_MOST_REDUCED)
        self._num_backwards = self._depth = 0  # a checkpoint calls the engine within a backward
        self._backward: Backward | None = None
        self._before: dict[Key, tuple[int, int, bool]] = {}
        self._frames = recorder.subscribe(Event.FRAME)
        reference = weakref.ref(self)

        def receiver(method: str) -> Callable[..., None]:
            def receive(args: tuple[Any, ...], kwargs: dict[str, Any], has_run: bool) -> None:
                if (window := reference()) is not None and window._frames.active:
                    getattr(window, method)(has_run, *args, **kwargs)

            return receive

        self._taps = Handles(self, [tap.add(receiver(method)) for method, tap in _TAPS.items()])

    def close(self) -> None:
        """Gather nothing until `renew`."""
        self._frames.active = False
        self.arrivals.clear()
        self._calls.clear()
        self._reduced.clear()

    def remove(self) -> None:
        """Close for good."""
        self.close()
        self._taps.remove()

    def renew(self, optimizer: Optimizer) -> None:
        """Open, and forget the backwards and clips before a step of this optimizer."""
        self._frames.active = True
        weights = ids_of(optimizer)
        for key in [key for key, x in self._weights() if id(x) in weights]:
            self.arrivals.pop(key, None)
        self._clips.clear()
        self._reduced.clear()
        self._depth = 0

    def _weights(self) -> Iterator[tuple[Key, Tensor]]:
        if (model := self._model()) is not None:
            yield from (((name, label), x) for name, label, x in each_weight(model) if x.requires_grad)

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call."""
        if self._frames.active and frame.phase == "forward" and frame.batch in self._batches:
            records = [record for record in frame.records if record.shape is not None]
            inputs = {(x.shape or (), x.abs_min, x.abs_max) for x in records if x.role == "input"}
            num_outputs = sum(record.role == "output" for record in records)
            self.num_calls += 1
            self._calls[frame.name] = Call(self.num_calls, inputs, num_outputs)

    def batch_started(self, batch: int) -> None:
        """Take the start of a batch in grad mode."""
        if self._frames.active:
            self._batches.append(batch)

    def backward(self, has_run: bool, tensors: object = None, *_: object, **__: object) -> None:
        """Take a call of `Tensor.backward`, before it frees its graph and when it is over."""
        self._depth += -1 if has_run else 1
        if self._depth != (not has_run):
            return
        with torch.no_grad(), only_our_dispatch():
            if not has_run:
                self._num_backwards += 1
                node = tensors.grad_fn if isinstance(tensors, Tensor) else None
                place, batch = place_of(sys._getframe(1)), self._recorder.latest_batch
                self._backward = Backward(place, batch, *_scaling(node), self.num_steps)
                self._before = {
                    key: (id(x.grad), x.grad._version, is_full(x.grad))
                    for key, x in self._weights()
                    if x.grad is not None
                }
            elif self._backward is not None:
                for key, x in self._weights():
                    known, version, was_full = self._before.get(key, (0, 0, False))
                    if x.grad is not None and (id(x.grad) != known or x.grad._version != version):
                        arrival = Arrival(self._backward, was_full, is_full(x.grad))
                        self.arrivals.setdefault(key, []).append(arrival)

    def clipped(
        self, has_run: bool, parameters: Any, max_norm: Any, total: Any = 0.0, *_: object, **__: object
    ) -> None:
        """Take a call of clip_grad_norm_."""
        if has_run:
            weights = parameters if isinstance(parameters, list | tuple) else [parameters]
            references = tuple(weakref.ref(x) for x in weights)
            place, before, norm = place_of(sys._getframe(1)), number(total) or 0.0, _norm_of(references)
            self._clips.append(Clip(references, float(max_norm), before, norm, place, self._num_backwards))

    def reduced(
        self, has_run: bool, tensor: Tensor, op: object = None, group: Any = None, *_: object, **__: object
    ) -> None:
        """Take a call of torch.distributed.all_reduce. A group of None is that of all ranks."""
        if not has_run and group is not None:
            self._reduced.append((weakref.ref(tensor), weakref.ref(group)))

    def group_sizes(self) -> dict[int, int]:
        """Return the number of ranks over which a tensor was reduced, by the tensor's id."""
        pairs = [(tensor(), group()) for tensor, group in self._reduced]
        return {id(x): group.size() for x, group in pairs if x is not None and group is not None}

    def clips(self, optimizer: Optimizer) -> list[Clip]:
        """Return the clips with the norms that the step is about to take: of all, for a clip of nothing."""
        weights = [weakref.ref(x) for group in optimizer.param_groups for x in group["params"]]
        return [clip._replace(at_step=_norm_of(clip.weights or weights)) for clip in self._clips]

    def calls_since(self, count: int) -> dict[str, Call]:
        """Return the latest call of each module that was called after the first `count` calls."""
        return {name: call for name, call in self._calls.items() if call.number > count}


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


def held_by_optimizers(but: Optimizer | None = None) -> set[int]:
    """Return the ids of the weights that the optimizers of this process hold, without those of one of them.

    The search for optimizers takes 10 ms for a million objects.
    """
    return set().union(*(ids_of(optimizer) for optimizer in instances_of(Optimizer) if optimizer is not but))


def scale_in_use(factors: Iterable[float]) -> float | None:
    """Return the scale of the GradScaler in use, if a loss was multiplied with it."""
    factors = list(factors)
    scale = getattr(find_scaler()(), "_scale", None) if factors else None
    value = float(scale) if isinstance(scale, Tensor) else None
    return value if value is not None and any(abs(x - value) <= 1e-3 * value for x in factors) else None


def is_taken_scaled(optimizer: Optimizer) -> bool:
    """Return whether a step takes gradients that nobody has divided by the scale; fused steps do so themselves."""
    if isinstance(getattr(optimizer, "grad_scale", None), Tensor):
        return False
    states = getattr(find_scaler()(), "_per_optimizer_states", {})
    stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
    return getattr(stage, "name", "READY") == "READY"
