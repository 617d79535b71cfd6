"""Operations of a part of a run, with fingerprints of what each was given and made, and the first that differs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..diagnosis.operation import Operation, operation_of, tensors_in
from ..diagnosis.provenance import program_frame
from ..numerics.fingerprint import fingerprint
from ..numerics.readable import is_plain, only_our_dispatch
from ..recording.walk import call_leaves

# Where the memory of an operand comes from, as far as this log has seen.
MADE, UNWRITTEN, OUTSIDE = "made", "unwritten", "outside"
_LOADER = str(torch.utils.data.__path__[0])


class OperationRecord(NamedTuple):
    """One operation: in which module, at which line, with what.

    `operands` are `[fingerprint, origin, detail]` of each tensor; the detail is the line that allocated unwritten
    memory, or the key of an outside storage. `numbers` are the other arguments as text. `is_random`: it draws random
    numbers, with `has_generator` from a generator that it was given. `in_loader`: a data loader of PyTorch runs it.
    """

    name: str
    module: str
    class_name: str
    source: str
    operands: tuple[tuple[int, str, str], ...]
    numbers: str
    results: tuple[int, ...]
    is_random: bool
    has_generator: bool
    in_loader: bool
    in_backward: bool


class OperationLog(TorchDispatchMode):
    """Mode that records the operations of its thread while `active`. No result is changed.

    `own` are the storages that are put back between runs. `writes` has, for each storage that is neither one of these
    nor made meanwhile, the operation that wrote to it first: a run leaves its traces there.
    """

    supports_higher_order_operators = True

    def __init__(self, own: frozenset[int], current: Callable[[], tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[OperationRecord] = []
        self.writes: dict[int, str] = {}
        self.active = False
        self._own = own
        self._current = current
        self._origins: dict[int, tuple[str, str]] = {}
        # With these, the address of a storage that was freed is not given to another one.
        self._storages: list[StorageWeakRef] = []
        # The place and module of the forward operation behind each node of the autograd graph.
        self._forward: dict[int, tuple[str, tuple[str, str]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record it."""
        kwargs = kwargs or {}
        if not self.active or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        operation = operation_of(func)
        source, named, in_loader, node = self._place()
        with only_our_dispatch(), torch.no_grad():
            operands = self._operands(operation, args, kwargs)
        result = func(*args, **kwargs)
        if not operation.written and not operation.fresh:
            return result
        with only_our_dispatch(), torch.no_grad():
            targets = operation.targets(args, kwargs, result)
            self._note_writes(operation, targets, source, named)
            results = () if operation.allocates else tuple(_bits(x) for x in targets)
        generator = any(isinstance(x, torch.Generator) for _, x in operation.given(args, kwargs))
        self.records.append(
            OperationRecord(
                operation.name,
                *named,
                source,
                operands,
                _numbers(args, kwargs),
                results,
                torch.Tag.nondeterministic_seeded in func.tags,
                generator,
                in_loader,
                node,
            )
        )
        return result

    def _place(self) -> tuple[str, tuple[str, str], bool, bool]:
        frame = program_frame(None)
        source = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        in_loader, inner = False, sys._getframe(1)
        while inner is not None and inner is not frame and not in_loader:
            in_loader = inner.f_code.co_filename.startswith(_LOADER)
            inner = inner.f_back  # type: ignore[assignment]
        named = self._current()
        node = torch._C._current_autograd_node()
        if node is not None:
            forward = self._forward.get(node._sequence_nr())
            if forward is not None:
                return *forward, in_loader, True
        else:
            # The node of an operation has been made just before it comes here. A later one without a node sees it too.
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, (source, named))
        return source, named, in_loader, node is not None

    def _operands(self, operation: Operation, args: Any, kwargs: Any) -> tuple[tuple[int, str, str], ...]:
        found = []
        for name, value in operation.given(args, kwargs):
            if name in operation.overwritten:
                continue
            for x in tensors_in(value):
                found.append((_bits(x), *self._origin(x)))
        return tuple(found)

    def _origin(self, x: Tensor) -> tuple[str, str]:
        if not is_plain(x):
            return MADE, ""
        key = x.untyped_storage()._cdata
        if key not in self._origins and key not in self._own:
            self._storages.append(StorageWeakRef(x.untyped_storage()))
        return self._origins.get(key) or (OUTSIDE, "" if key in self._own else str(key))

    def _note_writes(
        self, operation: Operation, targets: list[Tensor], source: str, named: tuple[str, str]
    ) -> None:
        fresh = len(targets) if not operation.written else 0
        for i, x in enumerate(targets):
            if not is_plain(x):
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            self._storages.append(StorageWeakRef(storage))
            if i < fresh:
                self._origins[key] = (UNWRITTEN, source) if operation.allocates else (MADE, "")
            elif key not in self._origins and key not in self._own:
                self.writes.setdefault(
                    key, f"{operation.name} of {named[0] or named[1] or 'the run'} at {source}"
                )
            elif x.numel() * x.element_size() == storage.nbytes():
                self._origins[key] = (MADE, "")


def _bits(x: Tensor) -> int:
    try:
        return fingerprint(x)
    except TypeError:  # sparse, nested, meta
        return 0


def _numbers(args: Any, kwargs: Any) -> str:
    found = []
    for label, x in call_leaves(args, kwargs):
        if isinstance(x, bool | int | float | complex | str | torch.dtype | torch.device | torch.layout):
            found.append(f"{label.removeprefix('input')[1:-1]}={x!r}")
    return ", ".join(found)


@dataclass(frozen=True, slots=True)
class OperationDifference:
    """First operation that two runs do not have alike. `how` is in what: "path", "numbers", "operands", "results"."""

    how: str
    a: OperationRecord
    b: OperationRecord | None
    equal_before: int

    @property
    def operand(self) -> tuple[str, str]:
        """Where the first operand that differs comes from."""
        if self.b is not None:
            for one, other in zip(self.a.operands, self.b.operands, strict=False):
                if one[0] != other[0]:
                    return one[1], one[2]
        return MADE, ""


def first_operation(a: list[OperationRecord], b: list[OperationRecord]) -> OperationDifference | None:
    """Return the first operation that differs between two runs."""
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if (one.name, one.source, len(one.operands)) != (other.name, other.source, len(other.operands)):
            return OperationDifference("path", one, other, i)
        if one.numbers != other.numbers:
            return OperationDifference("numbers", one, other, i)
        if [x[0] for x in one.operands] != [x[0] for x in other.operands]:
            return OperationDifference("operands", one, other, i)
        if one.results != other.results:
            return OperationDifference("results", one, other, i)
    same = min(len(a), len(b))
    longer = a if len(a) > same else b
    return OperationDifference("path", longer[same], None, same) if len(longer) > same else None
