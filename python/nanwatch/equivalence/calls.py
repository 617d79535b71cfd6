"""Module calls of a run with copies of their tensors, and the pairs of calls that two runs have in common."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..instrumentation.slot import TemporaryWrapper, attached
from ..recording.walk import Leaf, call_leaves, leaves
from ..util.modules import each_module, has_parameters
from ..util.visible import first_few, module_name
from .differences import KeptTensor, Store, relative_errors, side_by_side, total, weight_of


@dataclass(eq=False)
class ModuleCall:
    """Call of a module, with copies of its tensors. `key` is its path and which of the module's calls it is.

    `module` is None for a call of a trace. `start` and `end` count the starts and ends of all calls. `parent` is the
    call around it. `weight_shape` is that of the module's weight, or () where it has none.
    """

    key: tuple[str, int]
    class_name: str
    module: nn.Module | None
    parent: ModuleCall | None
    start: int
    end: int = 0
    is_leaf: bool = True
    inputs: list[KeptTensor] = field(default_factory=list)
    outputs: list[KeptTensor] = field(default_factory=list)
    weight_shape: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        """The name of the module."""
        return self.key[0]

    def holds(self, other: ModuleCall) -> bool:
        """Return True if the other call happened during this one."""
        return self.start < other.start and other.end < self.end


@dataclass(frozen=True)
class CallPair:
    """Calls that compute the same: one on each side, or several beside a fused one, in the order of its columns."""

    a: tuple[ModuleCall, ...]
    b: tuple[ModuleCall, ...]

    @property
    def name(self) -> str:
        """The names of both sides."""
        one, other = (", ".join(module_name(call.path) for call in side) for side in (self.a, self.b))
        return one if one == other else f"{one} | {other}"

    @property
    def modules(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules of both sides."""
        a, b = ([one.module for one in side if one.module is not None] for side in (self.a, self.b))
        return a, b

    def time(self, kind: str, side: int) -> int:
        """Return when the "inputs" or "outputs" were there, on side 0 or 1."""
        calls = (self.a, self.b)[side]
        return calls[0].start if kind == "inputs" else calls[-1].end


def innermost(calls: list[ModuleCall], start: int, end: int) -> ModuleCall:
    """Return the innermost call from one time to another."""
    return max((one for one in calls if one.start <= start and one.end >= end), key=lambda one: one.start)


def alone(calls: list[ModuleCall], pairs: list[CallPair], start: int, end: int) -> str:
    """Name the modules with parameters that one side calls between two times and that match none of the other's."""
    known = {id(one) for pair in pairs for one in (*pair.a, *pair.b)}
    between = [one for one in calls if start < one.start and one.end < end and one.is_leaf]
    found = [
        one
        for one in between
        if id(one) not in known and one.module is not None and has_parameters(one.module)
    ]
    return first_few([module_name(one.path) for one in found], 2)


def part_of_difference(parts: Sequence[ModuleCall], a: Tensor, b: Tensor, limit: float) -> list[str]:
    """Return in words which of the calls beside a fused one differ, unless all do."""
    widths = [one.outputs[0].shape[-1] for one in parts] if len(parts) > 1 else []
    if sum(widths) != a.shape[-1]:
        return []
    errors = [
        relative_errors(*both).total for both in zip(a.split(widths, -1), b.split(widths, -1), strict=True)
    ]
    off = [module_name(one.path) for one, error in zip(parts, errors, strict=True) if error > limit]
    return [f"in {', '.join(off)} only"] if 0 < len(off) < len(parts) else []


def is_sum(values: Sequence[KeptTensor]) -> bool:
    """Return True if the first two values may be hidden and residual."""
    if len(values) < 2:
        return False
    a, b = values[:2]
    return a.shape == b.shape and a.rows.shape == b.rows.shape and a.rows.is_floating_point()


def value(calls: Sequence[ModuleCall], kind: str, pick: tuple[int, ...]) -> KeptTensor | None:
    """Return a value of the call, or the sum of two; those of several calls, which had one input, side by side."""
    found = [getattr(one, kind) for one in (calls if kind == "outputs" else calls[:1])]
    if any(pick[-1] >= len(values) or len({values[i].shape for i in pick}) > 1 for values in found):
        return None
    sums = [total([values[i] for i in pick]) for values in found]
    return sums[0] if len(sums) == 1 else side_by_side(sums)


@contextmanager
def recorded(model: nn.Module, store: Store) -> Iterator[CallLog]:
    """Record the calls that this thread makes of the model and its parts, in the order in which they end.

    A class with a `__call__` of its own, as vLLM's under `support_torch_compile`, may call its `forward` past that of
    nn.Module. There a second wrapper takes the place of `forward`.
    """
    modules = [module for _, module in each_module(model)]
    log = CallLog(store, {id(module): path for path, module in each_module(model)})
    with ExitStack() as after:
        after.enter_context(attached(_Wrapper(module, log) for module in modules))
        for module in modules:
            if type(module).__call__ is not nn.Module.__call__ and "forward" not in vars(module):
                wrapper = _Wrapper(module, log, is_forward=True)
                wrapper.inner = module.forward
                vars(module)["forward"] = wrapper
                after.callback(vars(module).pop, "forward")
        yield log


class _Wrapper(TemporaryWrapper):
    """Wrapper that records the calls of its module."""

    def __init__(self, module: nn.Module, log: CallLog, *, is_forward: bool = False) -> None:
        super().__init__(module)
        self._log = log
        self._is_forward = is_forward

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        log = self._log
        is_known = self._is_forward and bool(log.inside) and log.inside[-1].module is module
        if is_known or is_compiling() or threading.get_ident() != log.thread:
            return self.run_inner(module, args, kwargs)
        # A module that is given a part of the model, as vLLM's LogitsProcessor the head, computes in its place.
        given = next((one for one in args if isinstance(one, nn.Module) and id(one) in log.paths), module)
        call = log.begin(given, log.paths[id(given)], call_leaves(args, kwargs))
        try:
            result = self.run_inner(module, args, kwargs)
        finally:
            log.inside.pop()
        log.end(call, leaves(result, "output"))
        return result


class CallLog:
    """Calls of one run, and the paths of the model's modules by their ids."""

    def __init__(self, store: Store, paths: dict[int, str]) -> None:
        self.paths = paths
        self.calls: list[ModuleCall] = []
        self.inside: list[ModuleCall] = []
        self.thread = threading.get_ident()
        self._store = store
        self._clock = itertools.count()
        self._occurrences: Counter[str] = Counter()

    def take(self) -> list[ModuleCall]:
        """Return the calls since the last time, and count those of each module anew."""
        found, self.calls = self.calls, []
        self._occurrences.clear()
        return found

    def begin(self, module: nn.Module, path: str, found: list[Leaf]) -> ModuleCall:
        """Add a call that begins, inside those that are under way."""
        parent = self.inside[-1] if self.inside else None
        if parent is not None:
            parent.is_leaf = False
        key = (path, self._occurrences[path])
        self._occurrences[path] += 1
        start, inputs = next(self._clock), self._keep(None, found)
        call = ModuleCall(key, type(module).__name__, module, parent, start, inputs=inputs)
        weight = weight_of(module)
        call.weight_shape = () if weight is None else tuple(weight.shape)
        self.inside.append(call)
        return call

    def end(self, call: ModuleCall, found: list[Leaf]) -> None:
        """End the call, whose outputs these are."""
        call.end = next(self._clock)
        call.outputs = [kept for kept in self._keep(call.module, found) if kept.rows.is_floating_point()]
        self.calls.append(call)

    def _keep(self, module: nn.Module | None, found: list[Leaf]) -> list[KeptTensor]:
        tensors = [
            x for _, x in found if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta
        ]
        kept = (self._store.keep(x, module) for x in tensors if x.numel() and x.dtype is not torch.bool)
        return [one for one in kept if one is not None]
