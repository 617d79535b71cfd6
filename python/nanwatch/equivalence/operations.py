"""Operations of a part of a run, with fingerprints of what each was given and made, and the first that differs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..diagnosis.operation import Operation, operation_of, tensors_in
from ..diagnosis.provenance import program_frame
from ..numerics.ranges import fingerprint
from ..numerics.readable import is_plain, only_our_dispatch
from ..recording.walk import leaves
from ..util.place import Place

# Where the memory of an operand comes from, as far as this log has seen.
MADE, UNWRITTEN, OUTSIDE = "made", "unwritten", "outside"
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
_LOADER = str(torch.utils.data.__path__[0])


class Operand(NamedTuple):
    """Tensor that an operation was given: its fingerprint, its storage, and where its memory comes from.

    `allocated` is the line that allocated memory which is UNWRITTEN.
    """

    bits: int
    storage: int
    origin: str
    allocated: str = ""


class OperationRecord(NamedTuple):
    """One operation: in which module, at which line, with what.

    `numbers` are the arguments that are no tensors, as text. `results` are `(fingerprint, storage)` of what it has
    written. `is_random`: it draws random numbers, with `has_generator` from a generator that it was given. `in_loader`:
    a data loader of PyTorch runs it.
    """

    name: str
    module: str
    class_name: str
    place: Place | None
    operands: list[Operand]
    numbers: str
    results: list[tuple[int, int]]
    is_random: bool
    has_generator: bool
    in_loader: bool
    in_backward: bool

    @classmethod
    def of(cls, values: Any) -> OperationRecord:
        """Return the record that JSON holds as a list."""
        found = cls(*values)
        place = None if found.place is None else Place(*found.place)
        return found._replace(place=place, operands=[Operand(*one) for one in found.operands])

    @property
    def bits(self) -> list[int]:
        """Fingerprints of the results."""
        return [one[0] for one in self.results]


class OperationLog(TorchDispatchMode):
    """Mode that records the operations of its thread while `active`. No result is changed.

    `own` are the storages that are put back between runs. `writes` has, for each storage that is neither one of these
    nor made meanwhile, the operation that wrote to it first: a run leaves its traces there. `fill` is put into memory
    that is left unwritten.
    """

    supports_higher_order_operators = True

    def __init__(self, own: frozenset[int], current: Callable[[], tuple[str, str]], fill: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[OperationRecord] = []
        self.writes: dict[int, str] = {}
        self.active = False
        self._own = own
        self._current = current
        self._fill = fill
        self._origins: dict[int, tuple[str, str]] = {}
        # With these, the address of a storage that was freed is not given to another one.
        self._storages: dict[int, StorageWeakRef] = {}
        self.target = 0
        # The place and module of the forward operation behind each node of the autograd graph.
        self._forward: dict[int, tuple[Place | None, tuple[str, str]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record it."""
        kwargs = kwargs or {}
        if not self.active or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        operation = operation_of(func)
        place, named, in_loader, node = self._place()
        with only_our_dispatch(), torch.no_grad():
            operands = self._operands(operation, args, kwargs)
        result = func(*args, **kwargs)
        if not operation.written and not operation.fresh:
            return result
        with only_our_dispatch(), torch.no_grad():
            targets = operation.targets(args, kwargs, result)
            self._note_writes(operation, targets, place, named)
            if operation.allocates and self._fill is not None:
                for x in targets:
                    x.fill_(self._fill)
            results = [] if operation.allocates else [(_bits(x), self._key(x)) for x in targets]
        generator = any(isinstance(x, torch.Generator) for _, x in operation.given(args, kwargs))
        self.records.append(
            OperationRecord(
                operation.name,
                *named,
                place,
                operands,
                _numbers(operation, args, kwargs),
                results,
                torch.Tag.nondeterministic_seeded in func.tags,
                generator,
                in_loader,
                node,
            )
        )
        return result

    def _place(self) -> tuple[Place | None, tuple[str, str], bool, bool]:
        frame = program_frame(None)
        place = None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)
        in_loader = by_engine = False
        inner: FrameType | None = sys._getframe(1)
        while inner is not None and inner is not frame:
            in_loader = in_loader or inner.f_code.co_filename.startswith(_LOADER)
            # Otherwise a hook of the program, or a backward that it defines, runs the operation.
            by_engine = by_engine or inner.f_code.co_name == "_engine_run_backward"
            inner = inner.f_back
        named = self._current()
        node = torch._C._current_autograd_node()
        if node is not None:
            forward = self._forward.get(node._sequence_nr())
            if forward is not None:
                return forward[0] if by_engine else place, forward[1], in_loader, by_engine
        else:
            # The node of an operation has been made just before it comes here. A later one without a node sees it too.
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, (place, named))
        return place, named, in_loader, False

    def _operands(self, operation: Operation, args: Any, kwargs: Any) -> list[Operand]:
        given = [x for x in operation.given(args, kwargs) if x[0] not in operation.overwritten]
        found = []
        for x in (x for _, value in given for x in tensors_in(value)):
            key = self._key(x)
            found.append(Operand(_bits(x), key, *self._origins.get(key, (OUTSIDE, ""))))
        return found

    def _key(self, x: Tensor) -> int:
        """Return the address of the tensor's storage, which no other storage gets from now on; 0 where it has none."""
        if not is_plain(x):
            return 0
        storage = x.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage)
        return int(storage._cdata)

    def _note_writes(
        self, operation: Operation, targets: list[Tensor], place: Place | None, named: tuple[str, str]
    ) -> None:
        for x in targets:
            key = self._key(x)
            if not operation.written:
                self._origins[key] = (UNWRITTEN, str(place or "")) if operation.allocates else (MADE, "")
            elif key not in self._origins and key not in self._own:
                self.writes.setdefault(
                    key, f"{operation.name} of {named[0] or named[1] or 'the run'} at {place or ''}"
                )
            elif key and x.numel() * x.element_size() == x.untyped_storage().nbytes():
                self._origins[key] = (MADE, "")

    def look(self, x: Tensor) -> None:
        """Take `x` for the tensor in which the runs part."""
        self.target = self._key(x)


def _bits(x: Tensor) -> int:
    try:
        return fingerprint(x)
    except TypeError:  # sparse, nested, meta
        return 0


def _numbers(operation: Operation, args: Any, kwargs: Any) -> str:
    found = [leaf for name, value in operation.given(args, kwargs) for leaf in leaves(value, name)]
    return ", ".join(f"{label}={x!r}" for label, x in found if isinstance(x, _PLAIN))


@dataclass(frozen=True, slots=True)
class OperationDifference:
    """First operation that two runs do not have alike. `how` is in what: "path", "numbers", "operands", "results"."""

    how: str
    a: OperationRecord
    b: OperationRecord | None

    @property
    def operand(self) -> Operand:
        """The first operand that differs."""
        for one, other in zip(self.a.operands, () if self.b is None else self.b.operands, strict=False):
            if one.bits != other.bits:
                return one
        return Operand(0, 0, MADE)


def first_operation(
    a: list[OperationRecord], b: list[OperationRecord], target: int
) -> OperationDifference | None:
    """Return the operation with which the difference of a tensor begins, whose storage in run `a` is `target`.

    It is the first operation with a difference on the way from one writer of a storage to the next. Others may differ
    and have no part in it. Without a writer of the tensor it is the first of all that differs.
    """
    paths = ([(one.name, one.place, len(one.operands)) for one in run] for run in (a, b))
    pairs = enumerate(zip(*paths, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(a), len(b)))
    begun: list[int] = []
    ahead, seen = [(target, same)], set[int]()
    while ahead:
        storage, before = ahead.pop()
        i = _writer(a, b, storage, before)
        if i is None or i in seen:
            continue
        seen.add(i)
        given = [
            one.storage
            for one, other in zip(a[i].operands, b[i].operands, strict=True)
            if one.bits != other.bits
        ]
        if a[i].numbers != b[i].numbers or not any(_writer(a, b, one, i) is not None for one in given):
            begun.append(i)
        ahead += [(one, i) for one in given]
    if begun:
        # A data loader draws an order and hands it on in Python, where no operation shows the way.
        drawn = (i for i in range(min(begun)) if a[i].in_loader and a[i].is_random and a[i].bits != b[i].bits)
        i = next(drawn, min(begun))
        return OperationDifference(_how(a[i], b[i]), a[i], b[i])
    for one, other in zip(a[:same], b, strict=False):
        if how := _how(one, other):
            return OperationDifference(how, one, other)
    if len(a) == same == len(b):
        return None
    ours, theirs = (found[same] if same < len(found) else None for found in (a, b))
    return (
        OperationDifference("path", ours, theirs)
        if ours
        else OperationDifference("path", theirs or b[same], None)
    )


def _how(one: OperationRecord, other: OperationRecord) -> str:
    if one.numbers != other.numbers:
        return "numbers"
    if [x.bits for x in one.operands] != [x.bits for x in other.operands]:
        return "operands"
    return "results" if one.bits != other.bits else ""


def _writer(a: list[OperationRecord], b: list[OperationRecord], storage: int, before: int) -> int | None:
    """Return the last operation before a place that wrote something else to a storage in each run."""
    return next(
        (
            i
            for i in range(before - 1, -1, -1)
            if any(
                one[1] == storage and one[0] != bits
                for one, bits in zip(a[i].results, b[i].bits, strict=False)
            )
        ),
        None,
    )
