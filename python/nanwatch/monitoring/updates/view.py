"""What the checks of an audit see: one step, the calls before it, and who else holds weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ...numerics.readable import only_our_dispatch
from ...records.record import Frame
from ...util.place import Place
from .backwards import Probe
from .samples import Key, StepSamples, WeightSample, number, plain

# Kinds of modules that autocast runs in 16 bits.
_CAST = ("Linear", "Conv1d", "Conv2d", "Conv3d")
Values: TypeAlias = tuple[object, ...]  # shape, least and largest magnitude


class Call(NamedTuple):
    """One recorded call of a module in grad mode, as far as the audit needs it."""

    module: str
    inputs: frozenset[Values]
    outputs: frozenset[Values]
    is_empty: bool  # called with a tensor without elements
    dtype: str  # of the output
    is_cast: bool  # a layer that autocast runs in 16 bits
    takes_16: bool  # an input has 16 bits


def call_of(frame: Frame) -> Call:
    """Return what the audit needs of a frame."""
    sides: dict[str, set[Values]] = {"input": set(), "output": set()}
    is_empty, dtype, takes_16 = False, "", False
    for row in frame.records:
        if row.role in sides and row.shape is not None:
            sides[row.role].add((row.shape, row.abs_min, row.abs_max))
            is_empty = is_empty or (row.role == "input" and 0 in row.shape)
            takes_16 = takes_16 or (row.role == "input" and row.dtype in ("bfloat16", "float16"))
            if row.role == "output":
                dtype = row.dtype
    ends = frozenset(sides["input"]), frozenset(sides["output"])
    return Call(frame.name, *ends, is_empty, dtype, frame.class_name in _CAST, takes_16)


def ancestors(module: str) -> Iterator[str]:
    """Yield the name of the module and of all that it is in, up to the root."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


class Clip(NamedTuple):
    """One call of clip_grad_norm_: its weights, the largest norm that it was to leave, the norm after it, its line.

    `at_step` is the norm of the same gradients when a step takes them.
    """

    weights: tuple[weakref.ref[Tensor], ...]
    max_norm: float
    norm: float
    place: Place | None
    batch: int = -1  # of the latest backward
    at_step: float = 0.0


def norm_of(weights: Iterable[weakref.ref[Tensor]]) -> float:
    """Return the 2-norm of the gradients of these weights."""
    grads = [x.grad for one in weights if (x := one()) is not None and x.grad is not None]
    values = [own for x in grads if (own := plain(x)) is not None]
    if not values:
        return 0.0
    with torch.no_grad(), only_our_dispatch():
        norms = torch._foreach_norm(values, 2.0, dtype=torch.float32)
        return sqrt(sum(float(one) ** 2 for one in norms))


class Suspect(NamedTuple):
    """A weight that may have a fault of this kind; `label` is None where a module is meant."""

    kind: str
    module: str
    label: str | None
    numbers: Mapping[str, float] = {}


@dataclass(slots=True, eq=False)
class StepView:
    """One audited step of `optimizer`, after it was made."""

    model: nn.Module
    optimizer: Optimizer
    samples: StepSamples
    calls: Sequence[Call]
    probes: Sequence[Probe]
    clips: Sequence[Clip]
    others: Callable[[], frozenset[int]]  # ids of weights in other optimizers
    is_first: bool  # the first optimizer of the model
    previous: StepSamples | None  # the step before, where it was audited too
    is_compiled: bool
    scale: float | None  # of a GradScaler in use
    is_scaled: bool  # the gradients of the step still have it
    mastered: frozenset[Key]  # weights with a master in the optimizer
    masters: Mapping[Key, float]  # share of elements that differ from their master
    replaced: frozenset[Key]  # by a master that was another weight before the first step
    casts: frozenset[str]  # device types under autocast in the forward
    called: frozenset[str]  # modules, without grad mode too
    _before: dict[Key, WeightSample] | None = field(default=None, init=False, repr=False)

    def trained(self) -> Iterable[WeightSample]:
        """Return the weights that the optimizer is to train."""
        return (one for one in self.samples.of_optimizer() if one.is_trained)

    def option(self, one: WeightSample, key: str) -> float:
        """Return a number of the weight's group in the optimizer, 0 where it has none."""
        return 0.0 if one.group is None else number(self.samples.groups[one.group].get(key)) or 0.0

    def before(self, key: Key) -> WeightSample | None:
        """Return a weight in the step before, None where that was not audited."""
        if self._before is None:
            self._before = {one.key: one for one in (() if self.previous is None else self.previous.weights)}
        return self._before.get(key)
