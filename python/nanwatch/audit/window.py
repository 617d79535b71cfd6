"""Samples of the weights at a step, and the calls, backwards, clips and reductions before it, for an audit.

Strided elements stand for a tensor: at most 1,024 of each. A wrapper around `torch.autograd.backward` looks at each
weight's `.grad` before and after it. Between audited steps the window is closed. Nothing here keeps a tensor of the
user alive.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from types import FrameType, SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import GlobalHooks, Handles
from ..instrumentation.wrapped_names import named_modules
from ..numerics._extension import instances_of
from ..numerics.readable import is_plain, local_shard, only_our_dispatch, unreadable
from ..recording.events import Event, Recorder
from ..records.record import Frame
from ..report.finding import Place
from ..util.modules import is_in
from ..util.visible import suppressing, users_frame

ELEMENTS = 1024
_MOST_LISTED = 256  # modules of a plain list
_MOST_REDUCED, _MOST_CLIPS = 8192, 64
_MAX_OPERATIONS = 16  # that a loss is followed through
_MEAN = 1  # the reduction of a loss, as the nodes of PyTorch's losses keep it
Key: TypeAlias = tuple[str, str]  # module and label
Grad: TypeAlias = Literal["none", "zero", "some"]
Values: TypeAlias = tuple[tuple[int, ...], float | None, float | None]  # shape, least and largest magnitude


def plain(x: Tensor | None) -> Tensor | None:
    """Return the strided tensor with values that `x` is, or that this process holds of it; None for any other."""
    if x is None:
        return None
    local = local_shard(x.detach())
    x = x.detach() if local is None else local
    return x if is_plain(x) and not unreadable(x) and x.is_floating_point() else None


def sample(x: Tensor) -> Tensor:
    """Return a copy of at most ELEMENTS elements of a plain tensor, evenly spread."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // ELEMENTS))].clone()


def is_full(x: Tensor | None) -> bool:
    """Return whether a tensor has an element that is not 0. Most need no more than a look at their sample."""
    values = plain(x)
    return values is not None and (bool(sample(values).any()) or bool(values.any()))


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether there are two samples, and they are equal, a nan being equal to itself."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def number(x: Any) -> float | None:
    """Return a number, or the one of a tensor with one element; None for anything else."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, int | float) else None


def place_of(frame: FrameType | None) -> Place | None:
    """Return the line of the user's that this frame was called from."""
    user = users_frame(frame)
    return None if user is None else Place(user.f_code.co_filename, user.f_lineno)


class Backward(NamedTuple):
    """One run of the autograd engine: its line, the latest batch, and the numbers that its loss was multiplied by.

    `elements` is the number that the loss is a mean over, where the loss knows it. `time` is the window's.
    """

    place: Place | None
    batch: int
    factors: tuple[float, ...]
    elements: float | None
    time: int


class Arrival(NamedTuple):
    """Gradient that came to a weight: whether `.grad` held something before, and whether it is other than 0.

    `gradient` is a sample of the first one of a loss that was multiplied by something.
    """

    backward: Backward
    was_full: bool
    is_full: bool
    gradient: Tensor | None = None


@dataclass(slots=True, eq=False)
class WeightSample:
    """One weight at one step. `grad` says whether there is a gradient, and `group` its place in the optimizer.

    `after` and `arrivals`, the gradients that came since the step before, are filled in when the step is over.
    """

    module: str
    label: str
    tensor: weakref.ref[Tensor]
    shape: tuple[int, ...]
    is_trained: bool
    is_meant: bool  # to be trained, by what the user says
    grad: Grad
    group: int | None = None
    lr: float | None = None
    before: Tensor | None = None
    gradient: Tensor | None = None
    after: Tensor | None = None
    arrivals: Sequence[Arrival] = ()

    @property
    def factors(self) -> set[float]:
        """The numbers that the losses behind its gradients were multiplied by."""
        return {factor for arrival in self.arrivals for factor in arrival.backward.factors}

    @property
    def key(self) -> Key:
        """Return module and label."""
        return self.module, self.label


def each_weight(model: nn.Module) -> Iterable[tuple[str, str, Tensor]]:
    """Yield each parameter once, with the name of its module and its own; also of modules in plain lists."""
    seen: set[int] = set()
    named = [(name, module) for name, _, module in named_modules(model)]
    listed = [pair for name, module in named for pair in _in_lists(name, module)]
    for name, module in [*named, *listed]:
        for label, x in list(module._parameters.items()):
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                yield name, label, x


def _in_lists(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield the modules in the plain lists and dicts of a module, which does not know of their parameters."""
    for attribute, value in list(vars(module).items()):
        if not attribute.startswith("_") and isinstance(value, list | tuple | dict):
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            for key, item in items[:_MOST_LISTED]:
                for inner, part in item.named_modules() if isinstance(item, nn.Module) else ():
                    yield ".".join(filter(None, (name, attribute, str(key), inner))), part


def ids_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's weights."""
    return {id(x) for group in getattr(optimizer, "param_groups", ()) for x in group["params"]}


def held_by_optimizers(but: Optimizer | None = None) -> set[int]:
    """Return the ids of the weights that the optimizers of this process hold, without those of one of them.

    The search for optimizers takes 10 ms for a million objects.
    """
    return set().union(*(ids_of(optimizer) for optimizer in instances_of(Optimizer) if optimizer is not but))


def sample_step(
    model: nn.Module, optimizer: Optimizer, is_frozen: Callable[[str], bool]
) -> dict[Key, WeightSample]:
    """Sample the weights of a model before a step.

    `is_frozen` says by the name of a weight or a module whether the user means it to stay as it is.
    """
    # An attribute of a module freezes nothing: its weights have their own.
    frozen = [item.name for item in named_modules(model) if vars(item.module).get("requires_grad") is False]
    places = {id(x): place for place, group in enumerate(optimizer.param_groups) for x in group["params"]}
    weights: dict[Key, WeightSample] = {}
    with torch.no_grad(), only_our_dispatch():
        for name, label, x in each_weight(model):
            is_kept = any(is_in(name, above) for above in frozen)
            is_kept = is_kept or is_frozen(name) or is_frozen(f"{name}.{label}")
            gradient, values = plain(x.grad), plain(x)
            grad: Grad = "none" if x.grad is None else "some"
            if gradient is not None and gradient.numel() and not is_full(gradient):
                grad = "zero"
            weight = weights[name, label] = WeightSample(
                name, label, weakref.ref(x), tuple(x.shape), x.requires_grad, not is_kept, grad
            )
            if values is not None and values.numel():
                weight.before, weight.group = sample(values), places.get(id(x))
                if gradient is not None and gradient.shape == values.shape:
                    weight.gradient = sample(gradient)
                if weight.group is not None:
                    weight.lr = number(optimizer.param_groups[weight.group].get("lr"))
    return weights


def sample_after(weights: Iterable[WeightSample], arrivals: Mapping[Key, Sequence[Arrival]]) -> None:
    """Add what came to the weights and what the step made of them, and forget gradients that it has changed."""
    with torch.no_grad(), only_our_dispatch():
        for weight in weights:
            weight.arrivals, x = arrivals.get(weight.key, ()), weight.tensor()
            if weight.before is not None and x is not None and (values := plain(x)) is not None:
                weight.after = sample(values)
                # A hook of the user's, or a fused step with a scale, changed it after it was sampled.
                gradient = plain(x.grad)
                if gradient is None or not same_bits(sample(gradient), weight.gradient):
                    weight.gradient = None


class Call(NamedTuple):
    """The latest call of a module in grad mode: the window's time, its inputs, the number of its outputs."""

    time: int
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
    gradients = [plain(x.grad) for reference in weights if (x := reference()) is not None]
    with torch.no_grad(), only_our_dispatch():
        norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in gradients if x is not None]
        return sqrt(sum(float(norm) ** 2 for norm in norms))


# Functions of PyTorch without hooks, and the methods of a Window that take their calls.
_TAPPED = (
    ("backward", torch.autograd, "backward"),
    ("clipped", torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
    ("reduced", torch.distributed, "all_reduce"),
    ("scaler_stepped", torch.amp.GradScaler, "step"),
)


def _replace(call: Callable[..., Any], method: str, owner: Any, name: str) -> Callable[[], None]:
    """Let a function call `call(method, whether it has run, args, kwargs)` too. Return what undoes this."""
    original = getattr(owner, name)

    def tell(has_run: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with suppressing(f"a call of {name} could not be audited"):
            call(method, has_run, args, kwargs)

    @functools.wraps(original)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        tell(False, args, kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            tell(True, args, kwargs)

    def restore() -> None:
        if getattr(owner, name) is tapped:
            setattr(owner, name, original)

    setattr(owner, name, tapped)
    return restore


def _replace_all(call: Callable[..., Any]) -> SimpleNamespace:
    # Some builds of PyTorch lack some of the functions.
    restores = [_replace(call, *tap) for tap in _TAPPED if hasattr(*tap[1:])]
    return SimpleNamespace(remove=lambda: [restore() for restore in restores])


# They are replaced while there is a hook.
_taps = GlobalHooks(_replace_all, traced=False)


class Window:
    """Gatherer for the audits of a model.

    `time` counts the beginnings and the ends of the steps of all optimizers. `called` has the modules that were called
    at any time, also without grad mode. `copies` are weights that began with equal values, and `has_trained` says
    whether an audit has seen the model in training mode. `skips` has the scales and the lines of the latest two steps
    in a row that a GradScaler has skipped with a scale of at most 1.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.time = 0
        self.arrivals: dict[Key, list[Arrival]] = {}  # since the latest step of the weight's optimizer
        self.called: set[str] = set()
        self.copies: dict[tuple[Key, ...], None] = {}
        self.has_trained = False
        self.skips: deque[tuple[float, Place | None]] = deque(maxlen=2)
        self._calls: dict[str, Call] = {}
        self._recorder, self._model = recorder, weakref.ref(model)
        self._clips: deque[Clip] = deque(maxlen=_MOST_CLIPS)
        self._batches: deque[int] = deque(maxlen=256)  # in grad mode
        self._reduced: deque[tuple[weakref.ref[Tensor], weakref.ref[Any]]] = deque(maxlen=_MOST_REDUCED)
        self._num_backwards = self._depth = 0  # a checkpoint calls the engine within a backward
        self._backward: Backward | None = None
        self._before: dict[Key, tuple[int, int, bool]] = {}
        self._frames = recorder.subscribe(Event.FRAME)
        reference = weakref.ref(self)

        def receive(method: str, has_run: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            window = reference()
            if window is not None and (window._frames.active or method == "scaler_stepped"):
                getattr(window, method)(has_run, *args, **kwargs)

        self._taps = Handles(self, [_taps.add(receive)])

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
        self._frames.active, self._depth = True, 0
        weights = ids_of(optimizer)
        for key in [key for key, x in self._weights() if id(x) in weights]:
            self.arrivals.pop(key, None)
        self._clips.clear()
        self._reduced.clear()

    def _weights(self) -> Iterator[tuple[Key, Tensor]]:
        if (model := self._model()) is not None:
            yield from (((name, label), x) for name, label, x in each_weight(model) if x.requires_grad)

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call."""
        if not self._frames.active or frame.phase != "forward":
            return
        self.called.add(frame.name)
        if frame.batch in self._batches:
            records = [record for record in frame.records if record.shape is not None]
            inputs = {(x.shape or (), x.abs_min, x.abs_max) for x in records if x.role == "input"}
            num_outputs = sum(record.role == "output" for record in records)
            self._calls[frame.name] = Call(self.time, inputs, num_outputs)

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
                self._backward = Backward(place, batch, *_scaling(node), self.time)
                self._before = {
                    key: (id(x.grad), x.grad._version, is_full(x.grad))
                    for key, x in self._weights()
                    if x.grad is not None
                }
            elif self._backward is not None:
                for key, x in self._weights():
                    *known, was_full = self._before.get(key, (0, 0, False))
                    if x.grad is not None and known != [id(x.grad), x.grad._version]:
                        arrivals = self.arrivals.setdefault(key, [])
                        is_first = self._backward.factors and not arrivals
                        values = plain(x.grad) if is_first else None
                        first = None if values is None else sample(values)
                        arrivals.append(Arrival(self._backward, was_full, is_full(x.grad), first))

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

    def scaler_stepped(self, has_run: bool, scaler: Any, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        """Take a call of `GradScaler.step`."""
        # A fused optimizer takes the signs from the device: only an audit may wait for these.
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not has_run or (is_fused and not self._frames.active):
            return
        state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
        is_skipped = any(map(float, state.get("found_inf_per_device", {}).values()))
        scale = float(scaler._scale) if is_skipped else inf
        if scale > 1:
            self.skips.clear()
        elif not ids_of(optimizer).isdisjoint(id(x) for _, x in self._weights()):
            self.skips.append((scale, place_of(sys._getframe(1))))

    def group_sizes(self) -> dict[int, int]:
        """Return the number of ranks over which a tensor was reduced, by the tensor's id."""
        pairs = [(tensor(), group()) for tensor, group in self._reduced]
        return {id(x): group.size() for x, group in pairs if x is not None and group is not None}

    def clips(self, optimizer: Optimizer) -> list[Clip]:
        """Return the clips with the norms that the step is about to take: of all, for a clip of nothing."""
        weights = [weakref.ref(x) for group in optimizer.param_groups for x in group["params"]]
        return [clip._replace(at_step=_norm_of(clip.weights or weights)) for clip in self._clips]

    def calls_since(self, time: int) -> dict[str, Call]:
        """Return the latest call of each module that was called since then."""
        return {name: call for name, call in self._calls.items() if call.time >= time}


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
