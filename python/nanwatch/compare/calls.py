"""Module calls of a run with copies of their tensors, and the pairs of calls that two runs have in common."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..instrumentation.slot import TemporaryWrapper, attached
from ..recording.walk import Leaf, call_leaves, leaves
from ..util.modules import each_module, has_parameters, is_in
from ..util.visible import first_few, module_name
from .tensors import KeptTensor, Store, side_by_side, sum_of_two
from .words import weight_of

COMPILED = "_orig_mod"  # the part of a path that torch.compile adds
SUM = -1  # index of the sum of the first two values of a call
# Values of a call's inputs or outputs that are tried against those of the other side.
_VALUES = 4
# Path of the module, and which of its calls it is.
Key = tuple[str, int]


@dataclass(eq=False)
class ModuleCall:
    """Call of a module, with copies of its tensors.

    `module` is None for a call of a trace. `start` and `end` count the starts and ends of all calls. `parent` is the
    call around it. `weight_shape` is that of the module's weight, or () where it has none.
    """

    key: Key
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

    def holds(self, call: ModuleCall) -> bool:
        """Return True if the call happened during this one."""
        return self.start < call.start and call.end < self.end


# Calls of one run, by their keys.
Runs = dict[Key, ModuleCall]


@dataclass(frozen=True)
class CallPair:
    """Calls that compute the same: one on each side, or several beside a fused one, in the order of its columns."""

    a: tuple[ModuleCall, ...]
    b: tuple[ModuleCall, ...]

    @property
    def sides(self) -> tuple[tuple[ModuleCall, ...], tuple[ModuleCall, ...]]:
        """The calls of A and those of B."""
        return self.a, self.b

    @property
    def names(self) -> tuple[str, str]:
        """The paths of A's modules and of B's."""
        a, b = (", ".join(call.path for call in side) for side in self.sides)
        return a, b

    @property
    def name(self) -> str:
        """The names of both sides in words."""
        return " | ".join(dict.fromkeys(map(module_name, self.names)))

    @property
    def modules(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules of both sides."""
        a, b = ([call.module for call in side if call.module is not None] for side in self.sides)
        return a, b

    @property
    def is_leaf(self) -> bool:
        """Whether no call holds another."""
        return all(call.is_leaf for side in self.sides for call in side)

    def time(self, kind: str, side: int) -> int:
        """Return when the "inputs" or "outputs" were there, on side 0 or 1."""
        calls = self.sides[side]
        return calls[0].start if kind == "inputs" else calls[-1].end


def innermost(calls: Sequence[ModuleCall], start: int, end: int) -> ModuleCall:
    """Return the innermost call from one time to another."""
    around = (call for call in calls if call.start <= start and call.end >= end)
    return max(around, key=lambda call: call.start)


def unmatched(calls: Sequence[ModuleCall], pairs: Sequence[CallPair], start: int, end: int) -> str:
    """Name the modules with parameters that are called between two times and that no pair has."""
    known = {id(call) for pair in pairs for side in pair.sides for call in side}
    between = [call for call in calls if start < call.start and call.end < end and call.is_leaf]
    alone = [
        module_name(call.path)
        for call in between
        if id(call) not in known and call.module is not None and has_parameters(call.module)
    ]
    return first_few(alone, 2)


def value(calls: Sequence[ModuleCall], kind: str, index: int) -> KeptTensor | None:
    """Return a value of the call, or the SUM of two; those of several calls, which had one input, side by side."""
    values = []
    for call in calls if kind == "outputs" else calls[:1]:
        kept: list[KeptTensor] = getattr(call, kind)[:_VALUES]
        chosen = sum_of_two(kept) if index == SUM else kept[index] if index < len(kept) else None
        if chosen is None:
            return None
        values.append(chosen)
    return values[0] if len(values) == 1 else side_by_side(values)


def num_values(calls: Sequence[ModuleCall], kind: str) -> int:
    """Return how many values of a call are compared."""
    return min(len(getattr(calls[0], kind)), _VALUES)


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made the module, or compiled its call or its forward."""
    space = vars(module)
    is_in_place = "_compiled_call_impl" in space or hasattr(
        space.get("forward"), "_torchdynamo_orig_callable"
    )
    return COMPILED in module._modules or is_in_place


def plain_path(path: str) -> str:
    """Return the path of a module without the parts that torch.compile adds."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


@contextmanager
def recorded(model: nn.Module, store: Store) -> Iterator[list[ModuleCall]]:
    """Record the calls that this thread makes of the model and its parts, in the order in which they end.

    Compiled modules are left as they are: only calls of the compiled module itself are recorded.
    """
    log = _CallLog(store)
    compiled: list[str] = []
    wrappers = []
    for path, module in each_module(model):
        if any(is_in(path, outer) for outer in compiled):
            continue
        if is_compiled(module):
            compiled.append(path)
        wrappers.append(_Wrapper(module, plain_path(path), log))
    with attached(wrappers):
        yield log.calls


class _Wrapper(TemporaryWrapper):
    """Wrapper that records the calls of its module."""

    def __init__(self, module: nn.Module, path: str, log: _CallLog) -> None:
        super().__init__(module)
        self._path = path
        self._log = log

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        log = self._log
        if is_compiling() or threading.get_ident() != log.thread:
            return self.run_inner(module, args, kwargs)
        call = log.begin(module, self._path, call_leaves(args, kwargs))
        try:
            result = self.run_inner(module, args, kwargs)
        finally:
            log.inside.pop()
        log.end(call, leaves(result, "output"))
        return result


class _CallLog:
    """Calls of one run."""

    def __init__(self, store: Store) -> None:
        self.calls: list[ModuleCall] = []
        self.inside: list[ModuleCall] = []
        self.thread = threading.get_ident()
        self._store = store
        self._clock = itertools.count()
        self._occurrences: Counter[str] = Counter()

    def begin(self, module: nn.Module, path: str, inputs: list[Leaf]) -> ModuleCall:
        """Return a call that begins, inside those that are under way."""
        parent = self.inside[-1] if self.inside else None
        if parent is not None:
            parent.is_leaf = False
        key = (path, self._occurrences[path])
        self._occurrences[path] += 1
        name, weight = type(module).__name__, weight_of(module)
        call = ModuleCall(key, name, module, parent, next(self._clock), inputs=self._keep(inputs))
        call.weight_shape = () if weight is None else tuple(weight.shape)
        self.inside.append(call)
        return call

    def end(self, call: ModuleCall, outputs: list[Leaf]) -> None:
        """End the call, whose outputs these are."""
        call.end = next(self._clock)
        call.outputs = [kept for kept in self._keep(outputs) if kept.rows.is_floating_point()]
        self.calls.append(call)

    def _keep(self, values: list[Leaf]) -> list[KeptTensor]:
        return [
            self._store.keep(x)
            for _, x in values
            if isinstance(x, Tensor)
            and x.layout is torch.strided
            and not x.is_meta
            and x.numel()
            and x.dtype is not torch.bool
        ]
