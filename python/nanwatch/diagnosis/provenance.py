"""Provenance of non-finite values: which operation of a call began the values of a tensor.

A TorchDispatchMode sees the operations, below autograd, autocast and functorch. It keeps no tensor alive. For a
non-finite one it keeps which bytes of which storage were written, by which step. A step is an operation of a re-run
that left non-finite values, with its place in the program.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isinf, isnan
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..numerics import _reference
from ..numerics.readable import is_plain, only_our_dispatch
from ..recording.events import Settings
from ..recording.observe import observe
from ..recording.walk import leaves
from ..records.record import Note, Record
from ..report.finding import Place, Value
from ..util.program_code import SKIPPED_FILES
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot
from .causes import addressable, causes

# In-place operations that do not look at what was there before.
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
) | {"log_normal_", "cauchy_", "geometric_", "_foreach_copy_", "_foreach_zero_"}
_VALUE = re.compile("number|float|Tensor")
# They give -inf for zero.
_LOGARITHMS = frozenset({"log", "log_", "log2", "log2_", "log10", "log10_"})
# A division or a logarithm does not forgive zeros and subnormals, which are usual among integers.
_COUNTS = Settings(), Settings(counts=True)
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


@dataclass(frozen=True, slots=True)
class Expression:
    """The source of an operation: file, line, and the expression, as `code.co_positions()` has it, where it is known.

    `code` is that of the function that computes it.
    """

    filename: str
    line: int
    positions: tuple[int | None, int | None, int | None, int | None] | None = None
    code: CodeType | None = None

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


# Operations as the dispatcher has them


class Operation:
    """The schema of an overload, as far as a re-run needs it.

    `values` are the arguments that take part in the arithmetic (an `int` is a dimension or a size), `written` those
    that it writes to, `overwritten` those of them that it does not read before; `fresh` are the positions of the
    results that are memory of their own. `allocates`: it leaves that memory unwritten.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name, self.base = str(func), schema.name.split("::")[-1]
        self.arguments = [x.name for x in schema.arguments]
        # A Python number is also given where the schema has a tensor, as in x * 2.
        self.values = {x.name for x in schema.arguments if _VALUE.search(str(x.type))}
        self.written = [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write]
        results = [x.name for x in schema.arguments if x.kwarg_only and x.name in self.written]
        self.overwritten = self.written[:1] if self.base in _OVERWRITING else results
        # Its result is its argument, by the schema: memory that Python data was written to, unseen.
        is_lifted = self.base == "lift_fresh"
        self.fresh = [i for i, x in enumerate(schema.returns) if is_lifted or x.alias_info is None]
        self.num_results = len(schema.returns)
        self.allocates = self.base.startswith(("empty", "new_empty", "_empty"))
        self.pointwise = torch.Tag.pointwise in func.tags

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Return `(name, value)` of the arguments that were given."""
        yield from zip(self.arguments, args, strict=False)
        yield from kwargs.items()

    def targets(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
        """Return the tensors that a call has written: its own arguments, and results that are new."""
        values = [value for name, value in self.given(args, kwargs) if name in self.written]
        results = (result,) if self.num_results == 1 else result
        values += [results[i] for i in self.fresh]
        return [x for value in values for x in tensors_in(value)]


operation_of = functools.cache(Operation)


class Operands(NamedTuple):
    """The operands of a call of `operation`: its tensors, a record with counts for each, and its numbers by name.

    `zero_one`: a logarithm was given zeros and ones, and nothing else.
    """

    operation: Operation
    tensors: list[Tensor]
    records: list[Record]
    numbers: list[tuple[str, float]]
    zero_one: bool


def operands_of(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
    """Return the operands of a call that is about to be made, or has been made and wrote to none of them."""
    tensors, numbers = list[Tensor](), list[tuple[str, float]]()
    for name, value in operation.given(args, kwargs):
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers += [(name, value)] if name in operation.values else []
        elif operation.base != "lift_fresh" and name not in operation.overwritten:
            tensors += tensors_in(value)
    labelled = ((f"operand[{i}]", x, _COUNTS[x.dtype.is_floating_point]) for i, x in enumerate(tensors))
    records = [observe(x, label, "input", wanted=wanted) for label, x, wanted in labelled]
    # Zeros alone choose nothing: a value that has vanished looks so.
    is_zero_one = operation.base in _LOGARITHMS and all(
        is_plain(x) and bool(((x == 0) | (x == 1)).all()) and bool((x == 1).any()) for x in tensors
    )
    return Operands(operation, tensors, records, numbers, is_zero_one)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result. The attributes of an object are no part of it."""
    if isinstance(value, Tensor):
        return [value]
    return [x for _, x in leaves(value, "", objects=False) if isinstance(x, Tensor)]


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
        latest, once = _bytes_of(x, latest), x.detach().as_strided(*_once(x), x.storage_offset())
        nonfinite = ~torch.isfinite(_reference._to_arithmetic(once))
        numbers = latest[nonfinite].unique().tolist() if bool(nonfinite.any()) else latest.unique().tolist()
        return [writes[number - 1] for number in numbers if number]


def _place_of(x: Tensor) -> tuple[Tensor, Any]:
    x = addressable(x)
    return x, x.untyped_storage() if is_plain(x) else x


def _once(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the tensor with one index for all of a dimension without a stride."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return tuple(1 if stride == 0 and size else size for size, stride in pairs), tuple(x.stride())


def _bytes_of(x: Tensor, memory: Tensor) -> Tensor:
    """Return what `memory` has for the bytes of `x`, with the bytes of one element in the last dimension."""
    size, (shape, strides) = x.itemsize, _once(x)
    strides = (*(stride * size for stride in strides), 1)
    return memory.as_strided((*shape, size), strides, int(x.storage_offset()) * size)


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
        if operation is None or not (operation.written or operation.fresh):
            return func(*args, **kwargs)
        # An operation in place overwrites its operand, so the operands are read before it runs.
        before = self._safely(operands_of, operation, args, kwargs) if operation.written else None
        result = func(*args, **kwargs)
        self._safely(self._look, operation, args, kwargs, before, result)
        return result

    def origin(self, x: Tensor, record: Record) -> Step | None:
        """Return the step that made the non-finite values of `x`, or its nans, as its record has it; None if unseen."""
        with only_our_dispatch(), torch.no_grad():
            return _origin(self._writes.find(x), "nan" in values_of(record))

    def last_write(self, x: Tensor) -> Step | None:
        """Return the last step that wrote to non-finite elements of `x`."""
        with only_our_dispatch(), torch.no_grad():
            return next(reversed(self._writes.find(x)), None)

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
        self, operation: Operation, args: Any, kwargs: Any, before: Operands | None, result: Any
    ) -> None:
        self._number += 1
        sequence = torch._C._autograd._get_sequence_nr()
        if sequence != self._sequence:  # autograd has made a node just before
            self._sequence = sequence
            self._nodes[sequence - 1] = self._site()[0]
        targets = operation.targets(args, kwargs, result)
        if operation.allocates:
            step = Step(self._number, operation.name, remarks=(_UNWRITTEN,))
            step.place, step.module = self._site()[0]
            for x in targets:
                self._writes.put(x, step)
            return
        pairs = [(x, observe(x, "", "output")) for x in targets]
        values = frozenset[Value]().union(*(values_of(record) for _, record in pairs))
        step = Step(self._number, operation.name, values)
        if step.values:
            (step.place, step.module), node = self._site()
            step.in_backward = torch._C._current_autograd_node() is not None
            step.operation = node or step.operation
            given = before or operands_of(operation, args, kwargs)
            bad = [x for x, record in pairs if record.isfinite is False]
            self._explain(step, given, bad, dict(operation.given(args, kwargs)))
            if len(self.steps) < _MOST_STEPS:
                self.steps.append(step)
        for x, record in pairs:
            self._writes.put(x, step if record.isfinite is False else None)

    def _explain(self, step: Step, given: Operands, bad: Sequence[Tensor], named: dict[str, Any]) -> None:
        """Fill in where the step's values in the `bad` tensors come from, and what is so of its operands."""
        step.operands = tuple(given.records)
        suspects = [i for i, record in enumerate(given.records) if record.isfinite is False]
        writers = {i: self._writes.find(given.tensors[i]) for i in suspects}
        guilty = _guilty(given, suspects, bad)
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
        remarks += [_of_meant(i, _origin(writers[i], False)) for i in guilty if i not in strangers]
        if not step.meant:
            remarks += causes(given.operation.base, named, given.tensors, strangers, self.open_calls)
        step.remarks = tuple(remarks)

    def _site(self) -> tuple[Site, str]:
        """Return the site of the operation under way, and the name of the node of the graph that runs it."""
        node, (frame, is_of_engine) = torch._C._current_autograd_node(), _program_frame(self._outermost)
        if node is not None and is_of_engine:
            return self.site_of(node), node.name()
        module = self.open_calls[-1].name if self.open_calls else None
        if module is None and node is not None:  # in a backward written in Python
            module = self.site_of(node)[1]
        if frame is None:
            return (None, module), ""
        code, positions = frame.f_code, None
        if sys.version_info >= (3, 11):  # an older Python does not know where in its line an expression is
            positions = next(islice(code.co_positions(), frame.f_lasti // 2, None), None)
        return (Expression(code.co_filename, frame.f_lineno, positions, code), module), ""


def _program_frame(outermost: CodeType) -> tuple[FrameType | None, bool]:
    """Return the innermost frame of the program: neither PyTorch's nor ours, nor that of a mode on the way.

    None if there is none inside the function whose code is `outermost`. The second value says whether autograd's engine
    runs what is under way, and not that frame inside a backward of it.
    """
    innermost: FrameType | None = None
    is_of_engine = False
    for frame, _ in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code is outermost:
            break
        if code.co_name in _HANDLERS:
            innermost = None
        elif innermost is None and code in ENGINE:
            is_of_engine = True
        elif innermost is None and not code.co_filename.startswith(SKIPPED_FILES):
            innermost = frame
    return innermost, is_of_engine or innermost is None


def _origin(steps: Sequence[Step], nan: bool) -> Step | None:
    """Return the first of the steps that these come from; of those that did it by accident, if any did."""
    steps = [step for step in steps if not step.meant] or list(steps)
    if nan:
        steps = [step for step in steps if "nan" in step.values] or steps
    origins = [step.origin or step for step in steps]
    # Memory as it was found may be anything: it is to blame only where nothing else is.
    origins = [step for step in origins if step.values] or origins
    return min(origins, key=lambda step: step.number, default=None)


def _guilty(given: Operands, suspects: list[int], bad: Sequence[Tensor]) -> list[int]:
    """Return the operands that made the result non-finite: of an elementwise one, those non-finite where it is."""
    if not suspects or not _is_elementwise(given, bad):
        return suspects
    hit = _nonfinite(bad[0])
    where = [hit] * len(given.tensors)
    if given.operation.base == "where" and len(given.tensors) == 3:
        condition = given.tensors[0]
        where[1:] = [hit & condition, hit & ~condition]
    return [i for i in suspects if bool((where[i] & _nonfinite(given.tensors[i])).any())]


def _nonfinite(x: Tensor) -> Tensor:
    return ~torch.isfinite(_reference._to_arithmetic(x))


def _is_elementwise(given: Operands, bad: Sequence[Tensor]) -> bool:
    """Return whether result and operands can be compared, element by element."""
    # An operation in place has overwritten an operand.
    is_comparable = given.operation.pointwise and not given.operation.written and len(bad) == 1
    return is_comparable and all(map(is_plain, (*bad, *given.tensors)))


def _is_meant(
    given: Operands, step: Step, bad: Sequence[Tensor], guilty: Sequence[int], sources: Sequence[Step]
) -> bool:
    """Return whether infinities are meant: written as constants, or passed on from such."""
    if given.operation.base == "lift_fresh" or any(isinf(value) for _, value in given.numbers):
        return True
    # Also one whose rows are masked throughout, which has the dtype's minimum and no note.
    is_masked = any(x.note == _MASK or (x.ends and x.abs_max == x.ends.largest) for x in given.records)
    if not guilty:
        # The sum of two masks that hold the dtype's minimum; the logarithm of a mask of zeros and ones.
        return "inf" not in step.values and (is_masked or given.zero_one)
    if _is_elementwise(given, bad):
        made = _nonfinite(bad[0])
        for i in guilty:
            made &= ~_nonfinite(given.tensors[i])
        return not bool(made.any())
    meant = {value for source in sources for value in source.values}
    return step.values <= (meant | {"-inf"} if is_masked else meant)


def _of_meant(operand: int, origin: Step | None) -> str:
    if origin is None:
        return f"operand[{operand}] is an additive mask"
    at = f" at {origin.place}" if origin.place else ""
    return f"operand[{operand}] holds {origin.spelt} that {origin.operation}{at} put there, on purpose as it seems"
