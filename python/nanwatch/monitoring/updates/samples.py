"""Samples of the weights, gradients and states of one step, and what the step made of them.

Strided elements stand for a tensor: at most 1,024 of each. Nothing here keeps a tensor of the user alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ...instrumentation.wrapped_names import named_modules
from ...numerics.ranges import fingerprint
from ...numerics.readable import is_plain, local_shard, only_our_dispatch, unreadable
from ...util.modules import is_in

ELEMENTS = 1024
Key: TypeAlias = tuple[str, str]  # module and label
Grad: TypeAlias = Literal["none", "zero", "some"]


def plain(x: Tensor) -> Tensor | None:
    """Return the strided tensor with values that `x` is, or that this process holds of it; None for any other."""
    local = local_shard(x.detach())
    x = x.detach() if local is None else local
    return x if is_plain(x) and not unreadable(x) and x.is_floating_point() else None


def sample(x: Tensor, most: int = ELEMENTS) -> Tensor:
    """Return a copy of at most so many elements of a plain tensor, evenly spread."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))].clone()


@dataclass(slots=True, eq=False)
class WeightSample:
    """One weight at one step. `grad` says whether there is a gradient, and `group` its place in the optimizer."""

    module: str
    label: str
    tensor: weakref.ref[Tensor]
    is_trained: bool
    grad: Grad = "none"
    group: int | None = None
    lr: float | None = None
    before: Tensor | None = None
    gradient: Tensor | None = None
    state: dict[str, Tensor | float] = field(default_factory=dict)
    whole: int | None = None  # a fingerprint of all elements, for weights that did not move last time
    after: Tensor | None = None
    shape: tuple[int, ...] = ()
    is_meant: bool = True  # to be trained, by what the user says
    # After the step: the values in float64 that the optimizer's rule gives; None where no rule is known.
    expected: Tensor | None = None

    @property
    def key(self) -> Key:
        """Return module and label."""
        return self.module, self.label

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def has_moved(self) -> bool | None:
        """Return whether the step changed the weight; None where that is not known."""
        if self.before is None or self.after is None:
            return None
        if not same_bits(self.before, self.after):
            return True
        x = self.tensor()
        if len(self.before) == self.size:
            return False
        return None if self.whole is None or x is None else fingerprint(x) != self.whole


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two samples are equal, a nan being equal to itself."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


@dataclass(slots=True, eq=False)
class StepSamples:
    """All weights of a model at one step of an optimizer. `foreign` are the optimizer's weights that it lacks."""

    step: int
    weights: list[WeightSample]
    foreign: list[tuple[int, ...]]
    groups: list[dict[str, Any]]  # without their weights
    rule: str  # the name of the optimizer's class

    def of_optimizer(self) -> Iterable[WeightSample]:
        """Return the weights that the optimizer holds."""
        return (one for one in self.weights if one.group is not None)


def each_weight(model: nn.Module) -> Iterable[tuple[str, str, Tensor]]:
    """Yield each parameter once, with the name of its module and its own."""
    seen: set[int] = set()
    for name, _, module in named_modules(model):
        for label, x in list(module._parameters.items()):
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                yield name, label, x


def _grads(gradients: Sequence[Tensor | None]) -> list[Grad]:
    """Say of each gradient whether it has an element that is not 0. Most need no more than a look at their samples."""
    found: list[Grad] = ["none" if x is None else "some" for x in gradients]
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for place, x in enumerate(gradients):
        if x is not None and x.numel() and (values := plain(x)) is not None:
            by_device.setdefault(x.device, []).append((place, values))
    for own in by_device.values():
        sampled = _are_zero([sample(x) for _, x in own])
        rest = [one for one, is_zero in zip(own, sampled, strict=True) if is_zero]
        for (place, _), is_zero in zip(rest, _are_zero([x for _, x in rest]), strict=True):
            found[place] = "zero" if is_zero else "some"
    return found


def _are_zero(tensors: list[Tensor]) -> list[bool]:
    if not tensors:
        return []
    norms = torch._foreach_norm(tensors, float("inf"))
    return [one == 0 for one in torch.stack([one.float() for one in norms]).tolist()]


def is_full(x: Tensor | None) -> bool:
    """Return whether a tensor has an element that is not 0."""
    values = None if x is None else plain(x)
    return values is not None and (bool(sample(values).any()) or bool(values.any()))


def sample_step(
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    still: frozenset[Key],
    is_frozen: Callable[[str], bool] = lambda _: False,
) -> StepSamples:
    """Sample the weights of a model before a step. Those in `still` get a fingerprint of all elements too.

    `is_frozen` says by the name of a weight or a module whether the user means it to stay as it is.
    """
    # An attribute of a module freezes nothing: its weights have their own.
    frozen = [one.name for one in named_modules(model) if vars(one.module).get("requires_grad") is False]
    places = {id(x): number for number, group in enumerate(optimizer.param_groups) for x in group["params"]}
    named = list(each_weight(model))
    own = {id(x) for _, _, x in named}
    weights: list[WeightSample] = []
    with torch.no_grad(), only_our_dispatch():
        grads = _grads([x.grad for _, _, x in named])
        for (name, label, x), grad in zip(named, grads, strict=True):
            one = WeightSample(name, label, weakref.ref(x), x.requires_grad, grad, shape=tuple(x.shape))
            weights.append(one)
            is_said = any(is_in(name, above) for above in frozen)
            one.is_meant = not (is_said or is_frozen(name) or is_frozen(f"{name}.{label}"))
            values = plain(x)
            if values is None or not values.numel():
                continue
            one.before = sample(values)
            if one.key in still:
                one.whole = fingerprint(values)
            one.group = places.get(id(x))
            if one.group is None:
                continue
            one.lr = number(optimizer.param_groups[one.group].get("lr"))
            gradient = None if x.grad is None else plain(x.grad)
            if gradient is not None and gradient.shape == values.shape:
                one.gradient = sample(gradient)
            one.state = _state(optimizer.state.get(x, {}), values)
    foreign = [
        tuple(x.shape) for group in optimizer.param_groups for x in group["params"] if id(x) not in own
    ]
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return StepSamples(step, weights, foreign, groups, type(optimizer).__name__)


def _state(state: Mapping[str, Any], x: Tensor) -> dict[str, Tensor | float]:
    """Sample what an optimizer keeps for a weight; what has another shape is left out, so that no rule is applied."""
    found: dict[str, Tensor | float] = {}
    for key, value in state.items():
        own = plain(value) if isinstance(value, Tensor) else None
        if own is not None and own.ndim and own.shape == x.shape:
            found[key] = sample(own)
        elif (scalar := number(value)) is not None:
            found[key] = scalar
        elif value is not None:
            found[key] = float("nan")  # something that no rule knows
    return found


def number(x: Any) -> float | None:
    """Return a number, or the one of a tensor with one element; None for anything else."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, int | float) else None


def sample_after(samples: StepSamples) -> None:
    """Add what the step made of the weights, and whether it left the gradients as they were."""
    with torch.no_grad(), only_our_dispatch():
        for one in samples.weights:
            x = one.tensor()
            values = None if x is None else plain(x)
            if one.before is None or x is None or values is None:
                continue
            one.after = sample(values)
            # A hook of the user's, or a fused step with a scale, changed it after it was sampled.
            if one.gradient is not None and (
                x.grad is None or (own := plain(x.grad)) is None or not same_bits(sample(own), one.gradient)
            ):
                one.gradient = None
