"""Provenance of non-finite values: which operation of a call began the values of a tensor.

A TorchDispatchMode sees the operations, below autograd, autocast and functorch. It keeps no tensor alive. For a
non-finite one it keeps which bytes of which storage were written, by which step. A step is an operation of a re-run
that left non-finite values, with its place in the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isinf, isnan
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..numerics._reference import without_repeats
from ..numerics.readable import is_plain, only_our_dispatch
from ..recording.observe import observe
from ..records.record import Note, Record
from ..report.finding import Place, Value
from ..util.messages import spell
from ..util.program import SKIPPED_FILES
from .batch_snapshot import BatchSnapshot
from .causes import Operands, Operation, addressable, causes, nonfinite, operation_of

# They give -inf for zero.
_LOGARITHMS = ("log", "log2", "log10")
# Who wrote an element last is found with an int32 for each byte of a storage that several operations wrote to.
_MOST_BYTES = 1 << 28
_VALUES: tuple[Value, ...] = ("nan", "inf", "-inf")
_MASK = Note("mask")
_UNWRITTEN = (
    "this memory was allocated and not written by any operation that was seen: it was used as it was found, or a kernel"
    " wrote it that does not go through PyTorch's dispatcher"
)
# Each keeps the operands that were non-finite before it.
_MOST_STEPS = 4096
# The functions that run a backward.
ENGINE = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_HANDLERS = ("__torch_dispatch__", "__torch_function__")
Positions: TypeAlias = tuple[int | None, int | None, int | None, int | None]


def positions_of(frame: FrameType) -> Positions | None:
    """Return where in the source the expression under way is. Python 3.10 does not know."""
    if sys.version_info < (3, 11):
        return None
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)


@dataclass(frozen=True, slots=True)
class Expression:
    """The source of an operation: file, line, and the expression, as `code.co_positions()` has it, where it is known.

    `code` is that of the function that computes it.
    """

    filename: str
    line: int
    positions: Positions | None = None
    code: CodeType | None = None

    @classmethod
    def of(cls, frame: FrameType) -> Expression:
        """Return the expression under way in a frame."""
        return cls(frame.f_code.co_filename, frame.f_lineno, positions_of(frame), frame.f_code)

    @property
    def at(self) -> Place:
        """The place for a report, with columns where the expression lies in one line."""
        line, last, start, end = self.positions or (None, None, None, None)
        is_known = line == last == self.line and start is not None
        return Place(self.filename, self.line, (start, end) if is_known else None)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return str(self.at)


@dataclass(slots=True, eq=False)
class Step:
    """One operation of a re-run that left non-finite `values`, or memory that nobody was seen to write, with no values.

    `origin` is the step that began its values, None when it began them itself; only then are `remarks`, `call` (around
    the operation) and `strangers` (the operands that were non-finite before) filled. `meant`: they are infinities that
    are there on purpose. `in_backward`: an engine of autograd ran it, in the backward of what module `module` did.
    """

    number: int
    operation: str
    values: frozenset[Value] = frozenset()
    meant: bool = False
    in_backward: bool = False
    origin: Step | None = None
    place: Expression | None = None
    module: str | None = None
    operands: tuple[Record, ...] = ()
    remarks: tuple[str, ...] = ()
    call: BatchSnapshot | None = None
    strangers: tuple[Tensor, ...] = ()

    @property
    def spelt(self) -> str:
        """The values in words: `nan`, `inf`, `-inf`, joined by `and`."""
        return " and ".join(value for value in _VALUES if value in self.values)

    @property
    def is_maker(self) -> bool:
        """Return whether the value was not there before, and is no constant that the program has written down."""
        is_written = any(x.endswith(("= nan", "= inf", "= -inf")) for x in self.remarks)
        return not (
            self.strangers or self.meant or is_written or self.operation.startswith("aten.lift_fresh.")
        )

    @property
    def made(self) -> Value | None:
        """The value that it made, None for memory that it left as it was."""
        return next((value for value in _VALUES if value in self.values), None)


def values_of(record: Record) -> frozenset[Value]:
    """Return which of nan, inf and -inf a record holds; both infinities where nobody counted."""
    if record.isfinite is not False:
        return frozenset()
    if (health := record.health) is None:
        return frozenset(_VALUES[:1] if isnan(record.abs_max or 0.0) else _VALUES[1:])
    counts = health.num_nan, health.num_posinf, health.num_neginf
    return frozenset(value for value, count in zip(_VALUES, counts, strict=True) if count)


class WriteLog:
    """Log of non-finite writes: which one wrote each element that is in memory.

    By storage it has the writes, the oldest first, and for each byte the number of its latest write, from 1 (0: one of
    finite values), unless the last stands for all. A sparse or nested tensor is a place of its own. The shard of a
    DTensor takes its place.
    """

    def __init__(self) -> None:
        self._places: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def put(self, x: Tensor, write: Any) -> None:
        """Note that `x` was written, by the non-finite `write`, or with finite values only (None)."""
        x, place = _place_of(x)
        size = place.nbytes() if is_plain(x) else 0
        is_whole = not size or x.numel() * x.itemsize == size
        writes, latest = ([], None) if is_whole else self._places.get(place, ([], None))
        if write is None and not writes:
            self._places.pop(place, None)
            return
        if latest is None and not is_whole and size <= _MOST_BYTES:
            latest = torch.full((size,), len(writes), dtype=torch.int32, device=x.device)
        writes += [] if write is None else [write]
        if latest is not None:
            _bytes_of(x, latest).fill_(0 if write is None else len(writes))
        self._places[place] = writes, latest

    def find(self, x: Tensor) -> list[Any]:
        """Return the last write to each non-finite element of `x`, the oldest write first."""
        x, place = _place_of(x)
        writes, latest = self._places.get(place, ([], None))
        if latest is None:
            return writes[-1:]  # type: ignore[no-any-return]
        latest, bad = _bytes_of(x, latest), nonfinite(without_repeats(x)[0])
        return [writes[number - 1] for number in latest[bad].unique().tolist() if number]


def _place_of(x: Tensor) -> tuple[Tensor, Any]:
    x = addressable(x)
    return x, x.untyped_storage() if is_plain(x) else x


def _bytes_of(x: Tensor, memory: Tensor) -> Tensor:
    """Return what `memory` has for the bytes of `x`, with the bytes of one element in the last dimension."""
    x, size = without_repeats(x)[0], x.itemsize
    strides = (*(stride * size for stride in x.stride()), 1)
    return memory.as_strided((*x.shape, size), strides, int(x.storage_offset()) * size)


# The expression of the program that an operation belongs to, and the module whose call is around it.
Site: TypeAlias = tuple[Expression | None, str | None]


class ProvenanceMode(TorchDispatchMode):
    """Mode that reads each operation of this thread. `origin` then tells where a non-finite tensor comes from.

    `outermost` is the code of the function above which there are no frames of the program. `open_calls` are the module
    calls under way, the innermost last. `steps` are the first of the operations that left non-finite values. An
    operation that autograd runs is reported as the node of the graph that runs it, at the line of the forward that made
    the node. No result is changed, and nothing is raised but what the operations raise; what could not be followed is
    reported in `trouble`.
    """

    supports_higher_order_operators = True

    def __init__(self, outermost: CodeType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.active = True
        self.trouble: str | None = None
        self.open_calls: list[BatchSnapshot] = []
        self._outermost = outermost
        self._sequence = torch._C._autograd._get_sequence_nr()
        self._nodes: dict[int, Site] = {}  # by sequence number, where the forward made the node
        self._writes = WriteLog()
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what it wrote."""
        kwargs = kwargs or {}
        operation = operation_of(func) if self.active and hasattr(func, "_schema") else None
        if operation is None:
            return func(*args, **kwargs)
        named = {**dict(zip(operation.arguments, args, strict=False)), **kwargs}
        # An operation in place overwrites its operand, so the operands are read before it runs.
        before = self._safely(Operands.of, operation, named) if operation.written else None
        result = func(*args, **kwargs)
        self._safely(self._look, operation, named, before, result)
        return result

    def origin(self, x: Tensor, record: Record) -> Step | None:
        """Return the step that made the non-finite values of `x`, or its nans, as its record has it; None if unseen.

        Where the run began with what an earlier one wrote to `x`, that is the last to write there.
        """
        with only_our_dispatch(), torch.no_grad():
            steps = self._writes.find(x)
            step = _origin(steps, "nan" in values_of(record))
            before = () if step is None else filter(is_plain, step.strangers)
            was_there = is_plain(x) and any(x.data_ptr() == y.data_ptr() for y in before)
            return steps[-1] if was_there else step

    def site_of(self, node: Any) -> Site:
        """Return where the forward made this node of the graph."""
        return self._nodes.get(node._sequence_nr(), (None, None))

    def _safely(self, look: Callable[..., Any], operation: Operation, *given: Any) -> Any:
        try:
            with only_our_dispatch(), torch.no_grad():
                return look(operation, *given)
        except Exception as error:
            self.trouble = f"{operation.name} could not be followed: {spell(error)}"
            return None

    def _look(
        self, operation: Operation, named: Mapping[str, Any], before: Operands | None, result: Any
    ) -> None:
        self._number += 1
        sequence = torch._C._autograd._get_sequence_nr()
        if sequence != self._sequence:  # autograd has made a node just before
            self._sequence = sequence
            self._nodes[sequence - 1] = self._site()[0]
        targets, step = operation.targets(named, result), None
        records = [] if operation.allocates else [observe(x, "", "output") for x in targets]
        bad = [x for x, record in zip(targets, records, strict=False) if record.isfinite is False]
        if bad or operation.allocates:
            (place, module), node = self._site()
            step = Step(self._number, node or operation.name, frozenset().union(*map(values_of, records)))
            step.place, step.module, step.remarks = place, module, () if bad else (_UNWRITTEN,)
            step.in_backward = torch._C._current_autograd_node() is not None
        if step is not None and bad:
            self._explain(step, before or Operands.of(operation, named), bad)
            if len(self.steps) < _MOST_STEPS:
                self.steps.append(step)
        for x in targets:
            is_bad = operation.allocates or any(x is y for y in bad)
            self._writes.put(x, step if is_bad else None)

    def _explain(self, step: Step, given: Operands, bad: Sequence[Tensor]) -> None:
        """Fill in where the step's values in the `bad` tensors come from, and what is so of its operands."""
        step.operands = tuple(given.records)
        guilty = [i for i, record in enumerate(given.records) if record.isfinite is False]
        if guilty and (shares := given.shares(bad)) is not None:
            guilty = [i for i in guilty if bool(shares[i].any())]
        writers = {i: self._writes.find(given.tensors[i]) for i in guilty}
        sources = [writer for i in guilty for writer in writers[i]]
        strangers = [i for i in guilty if not writers[i] and given.records[i].note != _MASK]
        is_live = any(not source.meant for source in sources)
        if not is_live and not strangers and "nan" not in step.values:
            step.meant = _is_meant(given, step, bad, guilty, sources)
        if is_live or (sources and step.meant):
            step.origin = _origin(sources, "nan" in step.values)
            return
        step.call = self.open_calls[-1] if self.open_calls else None
        step.strangers = tuple(given.tensors[i] for i in strangers)
        name = given.operation.name
        remarks = [f"{name} was given the number {key} = {value!r}" for key, value in given.numbers]
        for i in [i for i in guilty if i not in strangers]:
            origin, words = _origin(writers[i], False), f"operand[{i}] is an additive mask"
            if origin is not None:
                at = f" at {origin.place}" if origin.place else ""
                put = f"{origin.spelt} that {origin.operation}{at} put there"
                words = f"operand[{i}] holds {put}, on purpose as it seems"
            remarks.append(words)
        if not step.meant:
            remarks += causes(given, strangers, self.open_calls)
        step.remarks = tuple(remarks)

    def _site(self) -> tuple[Site, str]:
        """Return the site of the operation under way, and the name of the node of the graph that runs it.

        The site is in the innermost frame of the program: neither PyTorch's nor ours, nor that of a mode on the way.
        The node runs the operation unless such a frame does, inside a backward of the engine's.
        """
        node, innermost, is_of_engine = torch._C._current_autograd_node(), None, False
        for frame, _ in walk_stack(sys._getframe(1)):
            code = frame.f_code
            if code is self._outermost:
                break
            if code.co_name in _HANDLERS:
                innermost = None
            elif innermost is None and code in ENGINE:
                is_of_engine = True
            elif innermost is None and not code.co_filename.startswith(SKIPPED_FILES):
                innermost = frame
        if node is not None and (is_of_engine or innermost is None):
            return self.site_of(node), node.name()
        module = self.open_calls[-1].name if self.open_calls else None
        if module is None and node is not None:  # in a backward written in Python
            module = self.site_of(node)[1]
        return (None if innermost is None else Expression.of(innermost), module), ""


def _origin(steps: Sequence[Step], nan: bool) -> Step | None:
    """Return the first of the steps that these come from; of those that did it by accident, if any did."""
    steps = [step for step in steps if not step.meant] or list(steps)
    if nan:
        steps = [step for step in steps if "nan" in step.values] or steps
    origins = [step.origin or step for step in steps]
    # Memory as it was found may be anything: it is to blame only where nothing else is.
    origins = [step for step in origins if step.values] or origins
    return min(origins, key=lambda step: step.number, default=None)


def _is_meant(
    given: Operands, step: Step, bad: Sequence[Tensor], guilty: Sequence[int], sources: Sequence[Step]
) -> bool:
    """Return whether infinities are meant: written as constants, or passed on from such."""
    operation, tensors = given.operation, given.tensors
    if operation.base == "lift_fresh" or any(isinf(value) for _, value in given.numbers):
        return True
    # Also one whose rows are masked throughout, which has the dtype's minimum and no note.
    is_masked = any(x.note == _MASK or (x.ends and x.abs_max == x.ends.largest) for x in given.records)
    if not guilty:
        # The sum of two masks that hold the dtype's minimum; the logarithm of a mask of zeros and ones. Zeros alone
        # choose nothing: a value that has vanished looks so.
        if operation.base in _LOGARITHMS and is_plain(x := tensors[0]):
            is_masked |= bool(((x == 0) | (x == 1)).all()) and bool((x == 1).any())
        return "inf" not in step.values and is_masked
    if (shares := given.shares(bad)) is not None:
        made = nonfinite(bad[0])
        for i in guilty:
            made &= ~shares[i]
        return not bool(made.any())
    meant = {value for source in sources for value in source.values}
    if operation.base in ("sum", "mean"):  # which makes no mask of a mask
        return False
    return step.values <= (meant | {"-inf"} if is_masked else meant)
