"""The table of what a step gathered: samples of the weights, and the calls, backwards and clips before it.

Strided elements stand for a tensor: at most 1,024 of each. A wrapper around `torch.autograd.backward` looks at each
weight's `.grad` before and after it. Between audited steps the window is closed. Nothing here keeps a tensor of the
user alive.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isclose, sqrt
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..instrumentation.global_hooks import GlobalHooks, Handles, find_scaler, weakly
from ..instrumentation.wrapped_names import named_modules
from ..numerics._extension import instances_of
from ..numerics.readable import is_plain, local_shard, only_our_dispatch, unreadable
from ..recording.events import Event, Recorder
from ..records.record import Frame
from ..report.finding import Place
from ..util.messages import suppressing, users_frame
from ..util.program import is_in, parameters_of

ELEMENTS = 1024
_MOST_LISTED = 256  # modules of a plain list
_MOST_CLIPS = 64
_MAX_OPERATIONS = 16  # that a loss is followed through
_PARALLEL = 0.999  # the cosine between a gradient and itself times a number
_MEAN = 1  # the reduction of a loss, as the nodes of PyTorch's losses keep it
_WEIGHT = "weight"  # itself, beside the tensors of its state
Key: TypeAlias = tuple[str, str]  # module and label
IsFrozen: TypeAlias = Callable[[str], bool]
Grad: TypeAlias = Literal["none", "zero", "some"]


def plain(x: Tensor | None) -> Tensor | None:
    """Return the strided tensor with values that `x` is, or that this process holds of it; None for anything else."""
    if not isinstance(x, Tensor):
        return None
    local = local_shard(x.detach())
    x = x.detach() if local is None else local
    return x if is_plain(x) and not unreadable(x) and x.is_floating_point() else None


def sample(x: Tensor | None) -> Tensor | None:
    """Return a copy of at most ELEMENTS elements, evenly spread, of what is `plain` of a tensor."""
    if (values := plain(x)) is None:
        return None
    flat = values.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // ELEMENTS))].clone()


def is_full(x: Tensor | None) -> bool:
    """Return whether a tensor has an element that is not 0. Most need no more than a look at their sample."""
    values, few = plain(x), sample(x)
    return values is not None and few is not None and (bool(few.any()) or bool(values.any()))


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


def user_line() -> Place | None:
    """Return the line of the user's that the caller was called from."""
    user = users_frame(sys._getframe(1))
    return None if user is None else Place(user.f_code.co_filename, user.f_lineno)


def each_weight(model: nn.Module) -> Iterable[tuple[str, str, Tensor]]:
    """Yield each parameter once, with the name of its module and its own; also of modules in plain lists."""
    named = [(name, module) for name, _, module in named_modules(model)]
    listed = [pair for name, module in named for pair in _in_lists(name, module)]
    modules = [(name, list(module._parameters.items())) for name, module in [*named, *listed]]
    weights: dict[int, tuple[str, str, Tensor]] = {}
    for name, label, x in ((name, *item) for name, items in modules for item in items):
        if x is not None:
            weights.setdefault(id(x), (name, label, x))
    return weights.values()


def _in_lists(name: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield the modules in the plain lists and dicts of a module, which does not know of their parameters."""
    for attribute, value in list(vars(module).items()):
        if not attribute.startswith("_") and isinstance(value, list | tuple | dict):
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            for key, item in items[:_MOST_LISTED]:
                for inner, part in item.named_modules() if isinstance(item, nn.Module) else ():
                    yield ".".join(filter(None, (name, attribute, str(key), inner))), part


def held_by_optimizers(but: Optimizer | None = None) -> set[int]:
    """Return the ids of the weights of all optimizers but one. The search takes 10 ms for a million objects."""
    optimizers = [optimizer for optimizer in instances_of(Optimizer) if optimizer is not but]
    return {id(x) for optimizer in optimizers for x in parameters_of(optimizer)}


def is_relevant(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimizer has weights of the model, or seems to be meant for the model.

    Others of the same shapes may be those of a copy. Where no optimizer has any weight, this one may have old ones.
    """
    weights = [x for _, _, x in each_weight(model)]
    trained = [x for x in weights if x.requires_grad]
    parameters = parameters_of(optimizer)
    shapes = sorted(tuple(x.shape) for x in parameters)
    are_alike = bool(trained) and shapes == sorted(tuple(x.shape) for x in trained)
    if are_alike or not {*map(id, parameters)}.isdisjoint(map(id, weights)):
        return True
    return any(x.grad is not None for x in trained) and held_by_optimizers().isdisjoint(map(id, trained))


class Backward(NamedTuple):
    """One run of the autograd engine, and a gradient that it brought to a weight.

    `place` is its line, `batch` the latest batch, `factors` are the numbers that its loss was multiplied by, `elements`
    is the number that the loss is a mean over, where the loss knows it, and `time` is the window's. `was_full` says
    whether `.grad` was other than 0 before it. `gradient` is a sample of the first one.
    """

    place: Place | None
    batch: int
    factors: tuple[float, ...]
    elements: float | None
    time: int
    was_full: bool = False
    gradient: Tensor | None = None


class Call(NamedTuple):
    """The latest call of a module in grad mode: the window's time, its inputs, the number of its outputs."""

    time: int
    inputs: set[tuple[Any, ...]]  # shape, least and largest magnitude
    num_outputs: int


class Clip(NamedTuple):
    """One call of clip_grad_norm_: its weights, the most that it was to leave, the norm before and after it, its line.

    `sources` is the window's, `gradient` a sample of its first weight's, and `at_step` the norm of the same gradients
    when a step takes them. `has_turned` says whether the first is no multiple of its sample then: code added noise.
    """

    weights: tuple[weakref.ref[Tensor], ...]
    ids: frozenset[int]  # of these
    max_norm: float
    total: float
    norm: float
    place: Place | None
    gradient: Tensor | None
    sources: int
    at_step: float = 0.0
    has_turned: bool = False


def _norm_of(weights: Iterable[weakref.ref[Tensor]]) -> float:
    gradients = [plain(x.grad) for reference in weights if (x := reference()) is not None]
    with torch.no_grad(), only_our_dispatch():
        norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in gradients if x is not None]
        return sqrt(sum(float(norm) ** 2 for norm in norms))


def _at_step(clip: Clip, weights: Sequence[weakref.ref[Tensor]]) -> Clip:
    now = sample(getattr(weights[0](), "grad", None)) if weights else None
    if now is not None and clip.gradient is not None:
        cosine = torch.cosine_similarity(now.double(), clip.gradient.double(), 0)
        clip = clip._replace(has_turned=bool(cosine < _PARALLEL))
    return clip._replace(at_step=_norm_of(weights))


@dataclass(slots=True, eq=False)
class WeightSample:
    """One weight at one step. `grad` says whether there is a gradient, and `group` the number of its group.

    `before` and `after` are samples of it before and after the step, if there are values. `begin` and `end` have these
    and those of its state. `after`, `end` and `arrivals`, the gradients that came, are filled in after the step.
    """

    module: str
    label: str
    tensor: weakref.ref[Tensor]
    shape: torch.Size
    is_trained: bool
    is_meant: bool  # to be trained, by what the user says
    grad: Grad
    begin: Mapping[str, Tensor] = field(default_factory=dict)
    group: int | None = None
    lr: float | None = None
    gradient: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    end: Mapping[str, Tensor] = field(default_factory=dict)
    arrivals: Sequence[Backward] = ()

    @property
    def key(self) -> Key:
        """Return module and label."""
        return self.module, self.label


Weights: TypeAlias = Mapping[Key, WeightSample]


def _parts_of(x: Tensor, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return samples of a weight and of the tensors of its shape in the optimizer's state."""
    parts: dict[str, Any] = {**(optimizer.state.get(x) or {}), _WEIGHT: x}
    samples = ((name, sample(part)) for name, part in parts.items() if getattr(part, "shape", ()) == x.shape)
    return {name: values for name, values in samples if values is not None}


@dataclass(eq=False)
class Step:
    """The table of one audited step of `optimizer`, and of what a Window gathered since the step before.

    The step before ended at `since`, and `previous` are the weights in it, where it was audited too. `has_learned` says
    whether an audit has seen a gradient other than 0, and `is_frozen` by a name whether the user means a weight or a
    module to stay as it is. A GradScaler skips a step with the scale `skipped_with`. `in_optimizer` are the weights of
    the optimizer, `trained` those that it is to train. `finish` adds the latest `calls` since the step before, the
    weights that began equal (`copied`), `factors` of the losses, and the GradScaler among these, with its `scale`.
    """

    model: nn.Module
    optimizer: Optimizer
    window: Window
    is_frozen: IsFrozen
    previous: Weights
    since: int
    has_learned: bool
    skipped_with: float | None = None

    def __post_init__(self) -> None:
        """Sample the weights before the step."""
        # An attribute of a module freezes nothing: its weights have their own.
        modules = [(name, vars(module).get("requires_grad")) for name, _, module in named_modules(self.model)]
        frozen = [name for name, requires_grad in modules if requires_grad is False]
        groups = self.optimizer.param_groups
        places = {id(x): place for place, group in enumerate(groups) for x in group["params"]}
        self.clips, self.sources = self.window.clips(self.optimizer), self.window.sources
        self.weights: dict[Key, WeightSample] = {}
        with torch.no_grad(), only_our_dispatch():
            for name, label, x in each_weight(self.model):
                is_kept = any(is_in(name, above) for above in frozen)
                is_kept = is_kept or self.is_frozen(name) or self.is_frozen(f"{name}.{label}")
                grad: Grad = "none" if x.grad is None else "some"
                if (gradient := sample(x.grad)) is not None and gradient.numel() and not is_full(x.grad):
                    grad = "zero"
                facts = weakref.ref(x), x.shape, x.requires_grad, not is_kept, grad
                weight = self.weights[name, label] = WeightSample(name, label, *facts)
                if x.numel() and plain(x) is not None:
                    weight.begin, weight.group = _parts_of(x, self.optimizer), places.get(id(x))
                    weight.lr = None if weight.group is None else number(groups[weight.group].get("lr"))
                    weight.before, weight.gradient = weight.begin[_WEIGHT], gradient
        self.in_optimizer = [weight for weight in self.weights.values() if weight.group is not None]
        self.trained = [weight for weight in self.in_optimizer if weight.is_trained]

    def finish(self) -> None:
        """Add what was gathered and what the step made of the weights. Forget gradients that it has changed."""
        with torch.no_grad(), only_our_dispatch():
            for weight in self.weights.values():
                x = weight.tensor()
                weight.arrivals = self.window.arrivals.get(id(x), ())
                if weight.begin and x is not None:
                    weight.end = _parts_of(x, self.optimizer)
                    weight.after = weight.end.get(_WEIGHT)
                    # A hook of the user's, or a fused step with a scale, changed it after it was sampled.
                    if not same_bits(sample(x.grad), weight.gradient):
                        weight.gradient = None
        calls, copies = self.window.calls.items(), self.window.copies
        self.calls = {name: call for name, call in calls if call.time >= self.since}
        self.copied = [[self.weights[key] for key in keys if key in self.weights] for keys in copies]
        arrivals = [arrival for weight in self.in_optimizer for arrival in weight.arrivals]
        self.factors = {factor for arrival in arrivals for factor in arrival.factors}
        scaler = find_scaler()() if self.factors else None
        scale = number(getattr(scaler, "_scale", None)) or inf
        is_used = any(isclose(factor, scale, rel_tol=1e-3) for factor in self.factors)
        self.scaler: Any = scaler if is_used else None
        self.scale: float | None = scale if is_used else None


# Functions of PyTorch without hooks, and the methods of a Window that take their calls.
_TAPPED = (
    ("backward", torch.autograd, "backward"),
    ("clipped", torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
    ("reduced", torch.distributed, "all_reduce"),
    ("scaler_stepped", torch.amp.GradScaler, "step"),
)


def _replace(call: Callable[..., Any], method: str, owner: Any, name: str) -> Callable[[], None]:
    """Let a function call `call(method, whether it has run, args, kwargs)` too. Return what undoes this."""
    original, reason = getattr(owner, name), f"a call of {name} could not be audited"

    @functools.wraps(original)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        with suppressing(reason):
            call(method, False, args, kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            with suppressing(reason):
                call(method, True, args, kwargs)

    setattr(owner, name, tapped)
    return lambda: setattr(owner, name, original) if getattr(owner, name) is tapped else None


def _replace_all(call: Callable[..., Any]) -> SimpleNamespace:
    # Some builds of PyTorch lack some of the functions.
    restores = [_replace(call, *tap) for tap in _TAPPED if hasattr(*tap[1:])]
    return SimpleNamespace(remove=lambda: [restore() for restore in restores])


# They are replaced while there is a hook.
_taps = GlobalHooks(_replace_all, traced=False)


class Window:
    """Gatherer for the audits of a model.

    `time` counts the beginnings and the ends of the steps of all optimizers, `sources` the backwards and reductions.
    `batches` are those in grad mode, `calls` has the latest one of each module in these, and `called` the modules that
    were called at any time. `copies` are weights that began with equal values, and `has_trained` says whether an audit
    has seen the model in training mode. `group_sizes` are the numbers of ranks that reduced a tensor. `on_skip` gets
    the optimizer whose step a GradScaler has skipped, and a scale that is at most 1.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, on_skip: Callable[..., object]) -> None:
        self.time = 0
        self.arrivals: dict[int, list[Backward]] = {}  # by the weight's id, since its optimizer's latest step
        self.calls: dict[str, Call] = {}
        self.called: set[str] = set()
        self.copies: dict[tuple[Key, ...], None] = {}
        self.has_trained = False
        self.group_sizes = WeakTensorKeyDictionary()
        self._recorder, self._model, self._on_skip = recorder, weakref.ref(model), on_skip
        self._clips: deque[Clip] = deque(maxlen=_MOST_CLIPS)
        self.batches: deque[int] = deque(maxlen=256)
        self.sources = self._depth = 0  # a checkpoint calls the engine within a backward
        self._backward: Backward | None = None
        self._before: dict[int, tuple[int, int, bool]] = {}
        self._frames = recorder.subscribe(Event.FRAME)
        self.taps = Handles(self, [_taps.add(weakly(self._tapped))])

    def _tapped(self, method: str, has_run: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._frames.active or method == "scaler_stepped":
            getattr(self, method)(has_run, *args, **kwargs)

    def close(self) -> None:
        """Gather nothing until `renew`."""
        self._frames.active = False
        self.arrivals.clear()

    def renew(self, optimizer: Optimizer) -> None:
        """Open, and forget the backwards and clips before a step of this optimizer."""
        self._frames.active, self._depth = True, 0
        for key in map(id, parameters_of(optimizer)):
            self.arrivals.pop(key, None)
        self._clips.clear()
        self.group_sizes.clear()

    def _weights(self) -> list[Tensor]:
        model = self._model()
        return [] if model is None else [x for _, _, x in each_weight(model) if x.requires_grad]

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call."""
        if not self._frames.active or frame.phase != "forward":
            return
        self.called.add(frame.name)
        if frame.batch in self.batches:
            records = [record for record in frame.records if record.shape is not None]
            inputs = {(x.shape or (), x.abs_min, x.abs_max) for x in records if x.role == "input"}
            num_outputs = sum(record.role == "output" for record in records)
            self.calls[frame.name] = Call(self.time, inputs, num_outputs)

    def backward(self, has_run: bool, tensors: object = None, *_: object, **__: object) -> None:
        """Take a call of `Tensor.backward`, before it frees its graph and when it is over."""
        self._depth += -1 if has_run else 1
        if self._depth != (not has_run):
            return
        with torch.no_grad(), only_our_dispatch():
            if not has_run:
                self.sources += 1
                node = tensors.grad_fn if isinstance(tensors, Tensor) else None
                batch = self._recorder.latest_batch
                self._backward = Backward(user_line(), batch, *_scaling(node), self.time)
                gradients = [(id(x), x.grad) for x in self._weights() if x.grad is not None]
                self._before = {key: (id(x), x._version, is_full(x)) for key, x in gradients}
            elif self._backward is not None:
                for x in self._weights():
                    *known, was_full = self._before.get(id(x), (0, 0, False))
                    if x.grad is not None and known != [id(x.grad), x.grad._version]:
                        arrivals = self.arrivals.setdefault(id(x), [])
                        first = sample(x.grad) if self._backward.factors and not arrivals else None
                        arrivals.append(self._backward._replace(was_full=was_full, gradient=first))

    def clipped(
        self, has_run: bool, parameters: Any, max_norm: Any, total_norm: Any = 0.0, *_: object, **__: object
    ) -> None:
        """Take a call of clip_grad_norm_."""
        if has_run:
            weights = parameters if isinstance(parameters, list | tuple) else [parameters]
            references, place = tuple(weakref.ref(x) for x in weights), user_line()
            norms = float(max_norm), number(total_norm) or 0.0, _norm_of(references)
            first = sample(weights[0].grad) if weights else None
            clip = Clip(references, frozenset(map(id, weights)), *norms, place, first, self.sources)
            self._clips.append(clip)

    def reduced(self, has_run: bool, tensor: Tensor, op: Any = None, group: Any = None, *_: Any) -> None:
        """Take a call of torch.distributed.all_reduce. A group of None is that of all ranks."""
        if not has_run:
            self.sources += 1
            if group is not None:
                self.group_sizes[tensor] = group.size()

    def scaler_stepped(self, has_run: bool, scaler: Any, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        """Take a call of `GradScaler.step`."""
        # A fused optimizer takes the signs from the device: only an audit may wait for these.
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not has_run or (is_fused and not self._frames.active):
            return
        state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
        is_skipped = any(map(float, state.get("found_inf_per_device", {}).values()))
        if is_skipped and (scale := float(scaler._scale)) <= 1:
            self._on_skip(optimizer, scale)

    def clips(self, optimizer: Optimizer) -> list[Clip]:
        """Return the clips with the norms that the step is about to take: of all, for a clip of nothing."""
        weights = [weakref.ref(x) for group in optimizer.param_groups for x in group["params"]]
        return [_at_step(clip, clip.weights or weights) for clip in self._clips]


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
