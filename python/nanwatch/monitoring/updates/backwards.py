"""Backwards between two steps, seen at a few small weights: how many, from which line, and over which old gradients.

A hook on a leaf runs before its gradient is added to `.grad`. It is there from one audited step to the next, and reads
only whether `.grad` holds something by then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...instrumentation.global_hooks import Handles
from ...numerics.readable import only_our_dispatch
from ...util.place import Place
from ...util.visible import suppressed
from . import blame
from .samples import Key, each_weight, is_full, number

_PROBES = 6
_MAX_OPERATIONS = 16  # that a loss is followed through
# Operations that keep a term of a loss a term of it. A loss of more terms is followed no further.
_ADDITIVE = frozenset(
    {"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "SumBackward0", "StackBackward0"}
)
_MAX_TERMS = 4096
_MEAN = 1  # the reduction of a loss, as the nodes of PyTorch's losses keep it


class Backward(NamedTuple):
    """One run of the autograd engine: its line, the latest batch, and how the loss was scaled after it was reduced.

    `factors` and `divisors` are the numbers that it was multiplied with and divided by. `is_mean` says that it was
    reduced to a mean; it is False where that is not known. `penalized` are ids of weights whose squares it has.
    """

    place: Place | None = None
    batch: int = -1
    factors: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()
    is_mean: bool = False
    elements: float | None = None  # that the mean is over, where the loss knows it
    penalized: frozenset[int] = frozenset()
    num_steps: int = 0  # of all optimizers, before it


@dataclass(slots=True, eq=False)
class Probe:
    """A small weight, and what its hook saw since the latest step of its optimizer."""

    key: Key
    weight: weakref.ref[Tensor]
    # Of each backward: whether `.grad` held something before, and whether something came.
    arrivals: list[tuple[Backward, bool, bool]] = field(default_factory=list)

    @property
    def is_stale(self) -> bool:
        """Return whether `.grad` holds gradients from before the latest step: each backward added to them."""
        return bool(self.arrivals) and all(was_full for _, was_full, _ in self.arrivals)

    @property
    def resets(self) -> int:
        """Return how often `.grad` was emptied after a backward, and before the next."""
        return sum(not was_full for _, was_full, _ in self.arrivals[1:])


class BackwardProbes:
    """Hooks on a few weights of a model, from `open` to `close`."""

    def __init__(self, latest_batch: Callable[[], int]) -> None:
        self._latest_batch = latest_batch
        self.probes: list[Probe] = []
        self.num_steps = 0  # of all optimizers
        self._handles: Handles | None = None
        self.next = Backward()
        self._latest: tuple[int, Backward] = -1, self.next

    def open(self, model: nn.Module) -> None:
        """Leave the hooks on the smallest trained weights."""
        if self._handles is not None:
            return
        small = sorted(
            (
                (x.numel(), number, (name, label), x)
                for number, (name, label, x) in enumerate(each_weight(model))
                if x.requires_grad and x.is_leaf and x.numel()
            ),
            key=lambda one: one[:2],
        )
        # The first and the last have often different optimizers, as the parts of a GAN.
        chosen = {key: x for _, _, key, x in (*small[:_PROBES], *small[-1:])}
        self.probes = [Probe(key, weakref.ref(x)) for key, x in chosen.items()]
        hooks = [
            x.register_hook(_Hook(weakref.ref(self), one))
            for one, x in zip(self.probes, chosen.values(), strict=True)
        ]
        self._handles = Handles(self, hooks)

    def close(self) -> None:
        """Take the hooks away, and forget what they saw."""
        if self._handles is not None:
            self._handles.remove()
        self._handles, self.probes = None, []

    def starts(self, loss: object) -> None:
        """Take the start of a backward."""
        if self._handles is not None:
            self.next = backward_of(loss, self._latest_batch())._replace(num_steps=self.num_steps)

    def arrived(self, probe: Probe, gradient: Tensor) -> None:
        """Take a gradient that is about to be added to a probe's `.grad`."""
        task, x = torch._C._current_graph_task_id(), probe.weight()
        if x is None or task == -1:
            return
        if self._latest[0] != task:
            self._latest = task, self.next
        with torch.no_grad(), only_our_dispatch():
            probe.arrivals.append((self._latest[1], is_full(x.grad), is_full(gradient)))


class _Hook:
    def __init__(self, probes: weakref.ref[BackwardProbes], probe: Probe) -> None:
        self._probes = probes
        self._probe = probe

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None or is_compiling() or (probes := self._probes()) is None:
            return
        try:
            probes.arrived(self._probe, gradient)
        except Exception:
            suppressed("a backward could not be audited")


def backward_of(loss: object, batch: int) -> Backward:
    """Return what is known of a backward before it runs: its graph is freed on the way."""
    node = loss.grad_fn if isinstance(loss, Tensor) else None
    return Backward(blame.place_of(sys._getframe(2)), batch, *_scaling(node), _penalized(node))


def _scaling(node: Any) -> tuple[tuple[float, ...], tuple[float, ...], bool, float | None]:
    """Return what a loss was multiplied with and divided by, whether it was a mean before, and over how many."""
    factors: list[float] = []
    divisors: list[float] = []
    for _ in range(_MAX_OPERATIONS):
        kind = "" if node is None else node.name()
        if kind in ("MulBackward0", "DivBackward0"):
            other, node = _operands(node)
            if other is None:
                break
            (factors if kind == "MulBackward0" else divisors).append(other)
        elif kind in ("ToCopyBackward0", "CloneBackward0", "ViewBackward0", "SqueezeBackward0"):
            node = node.next_functions[0][0]
        else:
            is_mean = kind.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
            count = number(getattr(node, "_saved_total_weight", None)) if is_mean else None
            return tuple(factors), tuple(divisors), is_mean, count
    return tuple(factors), tuple(divisors), False, None


def _operands(node: Any) -> tuple[float | None, Any]:
    """Return the number that a loss was multiplied with or divided by, None for another operation; and the loss."""
    followed = [place for place, (one, _) in enumerate(node.next_functions) if one is not None]
    if len(followed) != 1 or (node.name() == "DivBackward0" and followed[0] != 0):
        return None, None
    names = ("_saved_self", "_saved_other")
    return number(getattr(node, names[1 - followed[0]], None)), node.next_functions[followed[0]][0]


def _penalized(loss: Any) -> frozenset[int]:
    """Return the ids of the leaves whose sum of squares is a term of the loss."""
    found, left = set(), [loss]
    for _ in range(_MAX_TERMS):
        if not left:
            break
        node = left.pop()
        kind = "" if node is None else node.name()
        if kind == "PowBackward0" and getattr(node, "_saved_exponent", None) == 2:
            inner = node.next_functions[0][0]
            if inner is not None and inner.name() in (
                "LinalgVectorNormBackward0",
                "NormBackward0",
                "NormBackward1",
            ):
                inner = inner.next_functions[0][0]
            if inner is not None and inner.name() == "torch::autograd::AccumulateGrad":
                found.add(id(inner.variable))
        elif kind in _ADDITIVE:
            left += [one for one, _ in node.next_functions]
    return frozenset(found)
