"""One step of an optimizer: samples of the weights, gradients and states before it, and of the weights after it.

Strided elements stand for a tensor: at most 1,024 of each. Nothing here keeps a tensor of the user alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


def is_full(x: Tensor | None) -> bool:
    """Return whether a tensor has an element that is not 0. Most need no more than a look at their sample."""
    values = None if x is None else plain(x)
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
                for inner, part in item.named_modules() if isinstance(item, nn.Module) else ():
                    yield ".".join(filter(None, (name, attribute, str(key), inner))), part


def ids_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's weights."""
    return {id(x) for group in getattr(optimizer, "param_groups", ()) for x in group["params"]}


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
            gradient = None if x.grad is None else plain(x.grad)
            grad: Grad = "none" if x.grad is None else "some"
            if gradient is not None and gradient.numel() and not is_full(gradient):
                grad = "zero"
            weight = weights[name, label] = WeightSample(
                name, label, weakref.ref(x), tuple(x.shape), x.requires_grad, not is_kept, grad
            )
            values = plain(x)
            if values is None or not values.numel():
                continue
            weight.before = sample(values)
            if gradient is not None and gradient.shape == values.shape:
                weight.gradient = sample(gradient)
            weight.group = places.get(id(x))
            if weight.group is not None:
                weight.lr = number(optimizer.param_groups[weight.group].get("lr"))
    return weights


def sample_after(weights: Iterable[WeightSample]) -> None:
    """Add what the step made of the weights, and forget gradients that it has changed."""
    with torch.no_grad(), only_our_dispatch():
        for weight in weights:
            x = weight.tensor()
            values = None if x is None else plain(x)
            if weight.before is None or x is None or values is None:
                continue
            weight.after = sample(values)
            # A hook of the user's, or a fused step with a scale, changed it after it was sampled.
            gradient = None if x.grad is None else plain(x.grad)
            if gradient is None or not same_bits(sample(gradient), weight.gradient):
                weight.gradient = None
