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

from ..instrumentation.wrapped_names import named_modules
from ..numerics.readable import is_plain, local_shard, only_our_dispatch, unreadable
from ..util.modules import is_in

ELEMENTS = 1024
_MOST_LISTED = 256  # modules of a plain list
Key: TypeAlias = tuple[str, str]  # module and label
Grad: TypeAlias = Literal["none", "zero", "some"]


def plain(x: Tensor) -> Tensor | None:
    """Return the strided tensor with values that `x` is, or that this process holds of it; None for any other."""
    local = local_shard(x.detach())
    x = x.detach() if local is None else local
    return x if is_plain(x) and not unreadable(x) and x.is_floating_point() else None


def sample(x: Tensor) -> Tensor:
    """Return a copy of at most ELEMENTS elements of a plain tensor, evenly spread."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // ELEMENTS))].clone()


@dataclass(slots=True, eq=False)
class WeightSample:
    """One weight at one step. `grad` says whether there is a gradient, and `group` its place in the optimizer."""

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
    state: dict[str, Tensor | float] = field(default_factory=dict)
    after: Tensor | None = None

    @property
    def key(self) -> Key:
        """Return module and label."""
        return self.module, self.label

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def has_moved(self) -> bool:
        """Return whether the step is seen to change the weight."""
        return self.before is not None and self.after is not None and not same_bits(self.before, self.after)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two samples are equal, a nan being equal to itself."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


@dataclass(slots=True, eq=False)
class StepSamples:
    """All weights of a model at one step of an optimizer.

    `foreign` are shape and format of those weights of the optimizer that the model lacks.
    """

    step: int
    by_key: dict[Key, WeightSample]
    foreign: list[tuple[tuple[int, ...], torch.dtype]]
    groups: list[dict[str, Any]]  # without their weights
    is_repeated: bool = False  # a step that called its closure again, as L-BFGS does

    def of_optimizer(self) -> Iterable[WeightSample]:
        """Return the weights that the optimizer holds."""
        return (weight for weight in self.by_key.values() if weight.group is not None)


def each_weight(model: nn.Module) -> Iterable[tuple[str, str, Tensor]]:
    """Yield each parameter once, with the name of its module and its own; also of modules in plain lists."""
    seen: set[int] = set()
    named = [(name, module) for name, _, module in named_modules(model)]
    for name, module in [*named, *_in_lists(named)]:
        for label, x in list(module._parameters.items()):
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                yield name, label, x


def _in_lists(named: Iterable[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    """Yield the modules that are in a list or a dict of a module, which does not know of their parameters."""
    for name, module in named:
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            for key, item in items[:_MOST_LISTED]:
                if isinstance(item, nn.Module):
                    place = f"{name}.{attribute}.{key}".lstrip(".")
                    yield from (
                        (f"{place}.{inner}".rstrip("."), part) for inner, part in item.named_modules()
                    )


def _grads(gradients: Sequence[Tensor | None]) -> list[Grad]:
    """Say of each gradient whether it has an element that is not 0. Most need no more than a look at their samples."""
    grads: list[Grad] = ["none" if x is None else "some" for x in gradients]
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for place, x in enumerate(gradients):
        if x is not None and x.numel() and (values := plain(x)) is not None:
            by_device.setdefault(x.device, []).append((place, values))
    for readable in by_device.values():
        sampled = _are_zero([sample(x) for _, x in readable])
        rest = [pair for pair, is_zero in zip(readable, sampled, strict=True) if is_zero]
        for (place, _), is_zero in zip(rest, _are_zero([x for _, x in rest]), strict=True):
            grads[place] = "zero" if is_zero else "some"
    return grads


def _are_zero(tensors: list[Tensor]) -> list[bool]:
    if not tensors:
        return []
    norms = torch._foreach_norm(tensors, float("inf"))
    return [norm == 0 for norm in torch.stack([norm.float() for norm in norms]).tolist()]


def is_full(x: Tensor | None) -> bool:
    """Return whether a tensor has an element that is not 0."""
    values = None if x is None else plain(x)
    return values is not None and (bool(sample(values).any()) or bool(values.any()))


def sample_step(
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    is_frozen: Callable[[str], bool] = lambda _: False,
) -> StepSamples:
    """Sample the weights of a model before a step.

    `is_frozen` says by the name of a weight or a module whether the user means it to stay as it is.
    """
    # An attribute of a module freezes nothing: its weights have their own.
    frozen = [item.name for item in named_modules(model) if vars(item.module).get("requires_grad") is False]
    places = {id(x): place for place, group in enumerate(optimizer.param_groups) for x in group["params"]}
    named = list(each_weight(model))
    ids = {id(x) for _, _, x in named}
    weights: dict[Key, WeightSample] = {}
    with torch.no_grad(), only_our_dispatch():
        grads = _grads([x.grad for _, _, x in named])
        for (name, label, x), grad in zip(named, grads, strict=True):
            is_kept = any(is_in(name, above) for above in frozen)
            is_kept = is_kept or is_frozen(name) or is_frozen(f"{name}.{label}")
            weight = WeightSample(
                name, label, weakref.ref(x), tuple(x.shape), x.requires_grad, not is_kept, grad
            )
            weights[name, label] = weight
            values = plain(x)
            if values is None or not values.numel():
                continue
            weight.before = sample(values)
            weight.group = places.get(id(x))
            if weight.group is None:
                continue
            weight.lr = number(optimizer.param_groups[weight.group].get("lr"))
            gradient = None if x.grad is None else plain(x.grad)
            if gradient is not None and gradient.shape == values.shape:
                weight.gradient = sample(gradient)
            weight.state = _state(optimizer.state.get(x, {}), values)
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    foreign = [x for group in optimizer.param_groups for x in group["params"] if id(x) not in ids]
    return StepSamples(step, weights, [(tuple(x.shape), x.dtype) for x in foreign], groups)


def _state(state: Mapping[str, Any], x: Tensor) -> dict[str, Tensor | float]:
    """Sample what an optimizer keeps for a weight. What no rule knows is nan, so that none is applied."""
    sampled: dict[str, Tensor | float] = {}
    for key, value in state.items():
        values = plain(value) if isinstance(value, Tensor) else None
        if values is not None and values.ndim and values.shape == x.shape:
            sampled[key] = sample(values)
        elif (scalar := number(value)) is not None:
            sampled[key] = scalar
        elif value is not None:
            sampled[key] = float("nan")
    return sampled


def number(x: Any) -> float | None:
    """Return a number, or the one of a tensor with one element; None for anything else."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, int | float) else None


def sample_after(samples: StepSamples) -> None:
    """Add what the step made of the weights, and forget gradients that it has changed."""
    with torch.no_grad(), only_our_dispatch():
        for weight in samples.by_key.values():
            x = weight.tensor()
            values = None if x is None else plain(x)
            if weight.before is None or x is None or values is None:
                continue
            weight.after = sample(values)
            # A hook of the user's, or a fused step with a scale, changed it after it was sampled.
            gradient = None if x.grad is None else plain(x.grad)
            if weight.gradient is not None and (
                gradient is None or not same_bits(sample(gradient), weight.gradient)
            ):
                weight.gradient = None
