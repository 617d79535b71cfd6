"""The data of a batch: its samples at fault, and how a dataset makes such a sample, by running that again.

A child process alone runs a dataset again: its `__getitem__` and the DataLoader's `collate_fn` may change anything.
"""

from __future__ import annotations

import ast
import linecache
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from numbers import Real
from types import FrameType, GeneratorType
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.data import DataLoader, IterableDataset

from ..numerics._extension import instances_of
from ..numerics.readable import is_plain, only_our_dispatch, unreadable
from ..precision.precision import replaced
from ..recording.observe import observe
from ..recording.walk import leaves
from ..report.finding import Place
from ..util.program import is_library
from . import isolation
from .batch_snapshot import LEAST_SECONDS, BatchSnapshot
from .causes import addressable, nonfinite
from .experiment import Trials

# Runs of a part of the batch. One of 64 samples takes 9.
_MOST_RUNS = 24
# Beyond this a bool for every element asks too much of a device that is full.
_MAX_ELEMENTS = 1 << 31
# Batches drawn again: eight workers have as many in hand.
_MOST_BATCHES = 17
_BATCH = "__nanwatch_batch__"


# Samples of a dataset


class Samples(nn.Module):
    """Samples of a dataset that a DataLoader's iterator reads. A call makes a batch of them, as it did.

    `number` is the index of the bad one, and `label` that of the output that has its bad values.
    """

    def __init__(self, iterator: Any, indices: Sequence[int], label: str = "") -> None:
        super().__init__()
        self._iterator, self.indices, self.label = iterator, list(indices), label
        self.number, self._name = indices[0], type(iterator._dataset).__name__

    def forward(self) -> Any:
        """Return the batch."""
        dataset = self._iterator._dataset
        fetch = getattr(dataset, "__getitems__", None) or (lambda indices: [dataset[i] for i in indices])
        return self._iterator._collate_fn(fetch(self.indices))

    def bad_outputs(self) -> dict[str, Tensor]:
        """Return the bad tensors of the batch by label."""
        return {label: x for label, x in leaves(self(), "output") if bad_tensors(x)}

    def alone(self) -> Samples:
        """Return the bad sample alone, or these where it is finite without the others."""
        x = self.bad_outputs()[self.label]
        if len(self.indices) > 1 and x.ndim and len(x) == len(self.indices):
            self.number = self.indices[int(nonfinite(x).nonzero()[0, 0])]
            alone = Samples(self._iterator, [self.number], self.label)
            labels = [*alone.bad_outputs()]
            alone.label = self.label if self.label in labels else next(iter(labels), "")
            return alone if labels else self
        return self

    def place(self) -> tuple[Place | None, str, str]:
        """Return the first line in which a name became bad, and its source; and words on where the sample is from.

        There is no line where the dataset holds the bad values. A line in which a name becomes bad in a finite sample
        too is left out, as it makes a mask.
        """
        near = (self.number + distance for distance in (-1, 1, -2, 2))
        others = (Samples(self._iterator, [i]) for i in near if 0 <= i < len(self._iterator._dataset))
        meant = set[Place]().union(*(x._bad_lines() for x in others if not x.bad_outputs()))
        lines = ((place, read) for place, read in self._bad_lines().items() if place not in meant)
        place, read = next(lines, (None, ""))
        words = f"sample {self.number} of the dataset ({self._name})"
        if place is None or read:
            return None, "", f"{words} holds it" + (f": `{read}` at {place} is bad" if read else "")
        text = linecache.getline(place.file, place.line).strip()
        return place, f"`{text}`", f"{words} has it, and was read again"

    def _bad_lines(self) -> dict[Place, str]:
        """Return the lines of the program in which a name became bad, or a bad value is returned, in their order.

        Beside each is what it reads from an object or a container, if that is bad.
        """
        lines, known = dict[Place, str](), dict[FrameType, tuple[set[str], int]]()

        def look(frame: FrameType, event: str, value: Any) -> Any:
            values = [*frame.f_locals.items(), *([("return", value)] if event == "return" else [])]
            bad = {name for name, x in values if _is_bad(x)}
            before, line = known.get(frame, (bad, 0))
            if bad - before:
                lines.setdefault(Place(frame.f_code.co_filename, line), _bad_read(frame, line))
            known[frame] = bad, frame.f_lineno
            return look

        sys.settrace(lambda frame, *_: None if is_library(frame.f_code.co_filename) else look)
        try:
            self()
        finally:
            sys.settrace(None)
        return lines


def _bad_read(frame: FrameType, line: int) -> str:
    """Return the source of a bad `name[...]` or `name.attribute` that the line reads; "" where there is none."""
    with suppress(Exception):  # a line may be a part of a statement, and its names may have changed
        statement: Any = ast.parse(linecache.getline(frame.f_code.co_filename, line).strip()).body[0]
        reads = map(ast.unparse, _reads(statement.value))
        return next(read for read in reads if _is_bad(eval(read, frame.f_globals, frame.f_locals)))
    return ""


def _reads(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Subscript | ast.Attribute):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        is_method = child is getattr(node, "func", None)
        yield from _reads(child.value if is_method and isinstance(child, ast.Attribute) else child)


def find_in_dataset(x: Tensor) -> Samples | str:
    """Find the sample that a bad tensor of the batch has its values from, in the datasets that are iterated over.

    Return in words why there is none, "" where that is not known.

    A batch, or a sample, is that of the tensor if it has as many bad elements in a tensor as this, or a row of this.
    """
    bad = nonfinite(x)
    counts = {int(bad.sum()), *bad.reshape(len(bad), -1).sum(1).tolist()} - {0} if x.ndim else {1}
    for samples in chain(*map(_batches, _iterators(iterable=False))):
        labels = (label for label, y in samples.bad_outputs().items() if int(nonfinite(y).sum()) in counts)
        for samples.label in labels:
            return samples.alone()
    origins = [f"an IterableDataset ({type(y._dataset).__name__})" for y in _iterators(iterable=True)]
    for frame in filter(None, (y.gi_frame for y in instances_of(GeneratorType))):
        if any(y is x for y in frame.f_locals.values()) and not is_library(frame.f_code.co_filename):
            origins = [f"the generator `{frame.f_code.co_name}`, {frame.f_code.co_filename}:{frame.f_lineno}"]
    return f"it came from {origins[0]}, which gives no sample a second time" if origins else ""


def redraw(loop: ast.For, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that the head of a loop binds, with the present batch drawn again; {} where that is not known.

    A tensor in it still has a name.
    """
    values = tensors_of([*names.values()])
    batches = [_batches(x) for x in _iterators(iterable=False) if isolation.is_child()]
    with suppress(isolation.RerunEndedError), isolation.limited(LEAST_SECONDS):
        for batch in (samples() for samples in chain(*batches)):
            if any(x.shape == y.shape and bool((x == y).all()) for x in tensors_of(batch) for y in values):
                is_counted = any(getattr(x, "id", "") == "enumerate" for x in ast.walk(loop.iter))
                bound = {_BATCH: (0, batch) if is_counted else batch}
                tree = ast.Module([ast.Assign([loop.target], ast.Name(_BATCH, ast.Load()))], [])
                exec(compile(ast.fix_missing_locations(tree), "", "exec"), bound)
                return bound
    return {}


def _iterators(*, iterable: bool) -> list[Any]:
    iterators: list[Any] = instances_of(get_type_hints(DataLoader.__iter__)["return"])
    return [x for x in iterators if isinstance(x._dataset, IterableDataset) == iterable and x._auto_collation]


def _batches(iterator: Any) -> Iterator[Samples]:
    """Yield the drawn batches, the latest first, then each sample alone if some are unknown, as of an ended sampler."""
    size, drawn = getattr(iterator._index_sampler, "batch_size", None) or 1, _drawn(iterator._sampler_iter)
    for start in range(0, len(drawn), size)[: -_MOST_BATCHES - 1 : -1]:
        yield Samples(iterator, drawn[start : start + size])
    for i in range(len(iterator._dataset) if len(drawn) <= size * (iterator._num_yielded - 1) else 0):
        yield Samples(iterator, [i])


def _drawn(iterator: Any) -> list[int]:
    """Return the indices that the iterator of a sampler has given, [] where it does not tell."""
    if isinstance(iterator, GeneratorType):
        names = {} if iterator.gi_frame is None else iterator.gi_frame.f_locals
        inner = map(_drawn, [iterator.gi_yieldfrom, *names.values()])
        return next(filter(None, inner), names.get("batch", []))
    if type(iterator) not in (type(iter([])), type(iter(range(0)))):
        return []
    # Python 3.12 forgets how far an iterator over a range has come, but not how much is left.
    sequence = iterator.__reduce__()[1][0]
    sequence = range(sequence.stop) if isinstance(sequence, range) else sequence
    return [*sequence[: len(sequence) - iterator.__length_hint__()]]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value, those of a distribution included: it holds tensors of a graph that is gone."""
    return [x for _, x in leaves(value, "", isinstance(value, Distribution)) if isinstance(x, Tensor)]


def bad_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value that are not finite and should be."""
    return [x for x in tensors_of(value) if observe(x, "", "output").is_fault]


def _is_bad(value: Any) -> bool:
    """Return whether a tensor, an array or a number in the value is not finite."""
    numbers = (x for _, x in leaves(value, "", objects=False) if isinstance(x, Real))
    return any(x - x != 0 for x in numbers) or bool(bad_tensors(value))


# Samples of a batch without which it is finite


def find_samples(trials: Trials, size: int) -> tuple[int, ...]:
    """Return the samples without which the batch is finite, and which are not finite alone; () where none are known.

    `size` is the number of samples, which are numbered by the first dimension of what the batch was called with.
    Nothing is told where half of the samples or more would be needed, or where a run without them fails, as one does
    whose samples depend on each other.
    """
    start = trials.snapshot

    def chosen(samples: Sequence[int], x: Tensor) -> Tensor | None:
        # Detached: the graph behind it is the user's.
        is_batch = x.ndim > 0 and x.shape[0] == size
        return x.detach()[list(samples)].requires_grad_(x.requires_grad) if is_batch else None

    def is_finite(samples: Sequence[int]) -> bool | None:
        """Run these samples alone. Return whether all is finite, None where the run raised or is one too many."""
        if trials.runs >= _MOST_RUNS:
            return None
        args, kwargs = replaced((start.args, dict(start.kwargs)), partial(chosen, samples))
        experiment = trials.run(snapshot=replace(start, args=args, kwargs=kwargs), judges=True)
        return not experiment.bad_labels() if experiment.error is None else None

    bad, rest = list[int](), list(range(size))
    while 2 * (len(bad) + 1) <= size and trials.runs < _MOST_RUNS:
        # The last sample of the shortest beginning that is not finite is bad.
        most = range(1, len(rest))
        bad.append(rest.pop(bisect_left(most, True, key=lambda count: is_finite(rest[:count]) is False)))
        if is_finite(rest):
            return tuple(sorted(bad)) if is_finite(bad) is False else ()
    return ()


def batch_size(snapshot: BatchSnapshot) -> int:
    """Return the number of samples; 0 where the tensors of the call do not agree on it."""
    tensors = [x for x in snapshot.tensors().values() if x.ndim]
    sizes = {x.shape[0] if x.layout is torch.strided and not x.is_nested else 0 for x in tensors}
    return sizes.pop() if len(sizes) == 1 else 0


# Where in a tensor its bad elements are


def describe(x: Tensor) -> str:
    """Return where the nan and inf of `x` are; "" when it cannot be told.

    One of "none", "all", "one element", "1 of 4096 rows, row 7" or "7 of 4096 rows" (whole rows: all positions of the
    last dimension), "column 5" or "3 of 8 columns" (whole columns of a matrix), "scattered over 5 of 4096 rows" (parts
    of 5 rows), "scattered". Reads any dtype and strides; of a DTensor the local shard. Returns "" for tensors of more
    than 2**31 elements, without values, and of other layouts than strided.
    """
    with only_our_dispatch(), torch.no_grad():
        x = addressable(x)
        if unreadable(x) or not is_plain(x) or x.numel() > _MAX_ELEMENTS:
            return ""
        bad = nonfinite(x)
        count = int(bad.sum())
        if count in (0, bad.numel()):
            return "all" if count else "none"
        if count == 1 or bad.ndim < 2:
            return "one element" if count == 1 else "scattered"
        rows, num_columns = bad.any(dim=-1).flatten().nonzero().flatten().tolist(), bad.shape[-1]
        num_rows = bad.numel() // num_columns
        if count == len(rows) * num_columns:
            which = f", row {rows[0]}" if len(rows) == 1 and bad.ndim == 2 else ""
            return f"{len(rows)} of {num_rows} rows{which}"
        columns = bad.any(dim=0).nonzero().flatten().tolist() if bad.ndim == 2 else []
        if columns and count == len(columns) * num_rows:
            return f"column {columns[0]}" if len(columns) == 1 else f"{len(columns)} of {num_columns} columns"
        return f"scattered over {len(rows)} of {num_rows} rows" if len(rows) < num_rows else "scattered"
