"""Alignment of the rows of two traces, though modules were added, removed, swapped or renamed.

Batches that made the same calls, as nearly all do, are compared as arrays. For the others the calls are aligned once
for each pair of patterns: first calls of the same module and class, as a diff of two texts does it; then, between
those, calls of the same class and with the same labels (a module put into a Sequential renames all behind it); at last
calls of the same name (a module that was swapped). This module needs no torch and no names: numbers stand for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from ..util.progress import Tell, silent

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Pairs: TypeAlias = "list[tuple[int, int]]"

# SequenceMatcher takes time for each pair of equal calls. Beyond half a second of it, calls of modules that are called
# more than once are matched by their order alone.
_MATCHED = 400_000


@dataclass(frozen=True)
class Rows:
    """Rows of a trace by batch and call, each column an array. The numbers mean the same on both sides.

    `module` and `kind` (its class) belong to the call, `again` says that it was recomputed, and `record` is role and
    label.
    """

    batch: Ints
    call: Ints
    module: Ints
    kind: Ints
    again: Ints
    record: Ints

    def patterns(self) -> Ints:
        """Return a number for each row. Two batches with equal numbers are compared as they stand."""
        first = np.ones(len(self.call), np.int64)
        first[1:] = (self.call[1:] != self.call[:-1]) | (self.batch[1:] != self.batch[:-1])
        # Mixed, not packed: 4 columns of numbers may not fit in 64 bits. Equal mixtures are taken for equal rows.
        mixed = first + 2 * self.again
        for column in (self.module, self.kind, self.record):
            mixed = mixed * np.int64(0x9E3779B97F4A7C1) + column
            mixed ^= mixed >> 29
        return mixed


@dataclass(frozen=True)
class Call:
    """A call in a pattern: its keys, from the strictest to the loosest, and the rows from `start` on."""

    exact: int
    similar: int
    module: int
    start: int
    records: tuple[int, ...]


def align(a: Rows, b: Rows, batches: Sequence[tuple[int, int]], tell: Tell = silent) -> tuple[Ints, Ints]:
    """Return the rows of `a` and the rows of `b` that match them, for these pairs of batches, in the order of `a`.

    On each side the rows of a batch stand together, and those of a call.
    """
    pattern_a, pattern_b = a.patterns(), b.patterns()
    known: dict[tuple[bytes, bytes], tuple[Ints, Ints]] = {}
    found_a: list[Ints] = []
    found_b: list[Ints] = []
    in_a, in_b = np.array(batches, np.int64).reshape(-1, 2).T
    starts_a, ends_a = (np.searchsorted(a.batch, in_a + past).tolist() for past in (0, 1))
    starts_b, ends_b = (np.searchsorted(b.batch, in_b + past).tolist() for past in (0, 1))
    bounds = zip(starts_a, ends_a, starts_b, ends_b, strict=True)
    for done, (start_a, end_a, start_b, end_b) in enumerate(bounds):
        tell("aligning", done, len(batches), "batches")
        one, other = pattern_a[start_a:end_a], pattern_b[start_b:end_b]
        if np.array_equal(one, other):
            found_a.append(np.arange(start_a, end_a))
            found_b.append(np.arange(start_b, end_b))
            continue
        key = (one.tobytes(), other.tobytes())
        if key not in known:
            known[key] = _align_batch(_calls(a, start_a, end_a), _calls(b, start_b, end_b))
        rows_a, rows_b = known[key]
        found_a.append(rows_a + start_a)
        found_b.append(rows_b + start_b)
    none = np.empty(0, np.int64)
    return np.concatenate([none, *found_a]), np.concatenate([none, *found_b])


def _calls(rows: Rows, start: int, end: int) -> list[Call]:
    """Return the calls of one batch; their `start` counts from the batch's first row."""
    number = rows.call[start:end]
    bounds = [0, *(np.flatnonzero(number[1:] != number[:-1]) + 1).tolist(), end - start]
    columns = (rows.module, rows.kind, rows.again, rows.record)
    module, kind, again, record = (column[start:end].tolist() for column in columns)
    calls = []
    for at, until in pairwise(bounds):
        records = tuple(record[at:until])
        exact = hash((module[at], kind[at], again[at]))
        calls.append(Call(exact, hash((kind[at], again[at], records)), module[at], at, records))
    return calls


def _align_batch(a: Sequence[Call], b: Sequence[Call]) -> tuple[Ints, Ints]:
    """Return the matching rows, counted from the first of the batch."""
    pairs = align_calls(a, b)
    found: Pairs = []
    for i, j in pairs:
        one, other = a[i], b[j]
        if one.records == other.records:
            found += [(one.start + k, other.start + k) for k in range(len(one.records))]
            continue
        place = {record: other.start + k for k, record in enumerate(other.records)}
        found += [(one.start + k, place[record]) for k, record in enumerate(one.records) if record in place]
    found.sort()
    both = np.array(found, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def align_calls(a: Sequence[Call], b: Sequence[Call]) -> Pairs:
    """Return the matching calls as positions, each at most once."""
    levels = [
        ([one.exact for one in a], [one.exact for one in b]),
        ([one.similar for one in a], [one.similar for one in b]),
        ([one.module for one in a], [one.module for one in b]),
    ]
    pairs: Pairs = []
    gaps = [(0, len(a), 0, len(b))]
    for keys_a, keys_b in levels:
        smaller = []
        for from_a, to_a, from_b, to_b in gaps:
            found = _common(keys_a[from_a:to_a], keys_b[from_b:to_b])
            found = [(i + from_a, j + from_b) for i, j in found]
            pairs += found
            smaller += _between(found, (from_a, to_a, from_b, to_b))
        gaps = smaller
    # Modules that were moved, so that no order brings them together.
    left_a = set(range(len(a))) - {i for i, _ in pairs}
    waiting = defaultdict(list)
    for j in sorted(set(range(len(b))) - {j for _, j in pairs}, reverse=True):
        waiting[b[j].exact].append(j)
    pairs += [(i, waiting[a[i].exact].pop()) for i in sorted(left_a) if waiting[a[i].exact]]
    return sorted(pairs)


def _between(pairs: Pairs, whole: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """Return the gaps that the pairs, in order, leave on both sides."""
    from_a, to_a, from_b, to_b = whole
    gaps = []
    for i, j in [*pairs, (to_a, to_b)]:
        if i > from_a and j > from_b:
            gaps.append((from_a, i, from_b, j))
        from_a, from_b = i + 1, j + 1
    return gaps


def _common(a: Sequence[int], b: Sequence[int]) -> Pairs:
    """Return a long common subsequence: equal ends, and what difflib finds between them."""
    least = min(len(a), len(b))
    begin = next((i for i in range(least) if a[i] != b[i]), least)
    end = next((i for i in range(least - begin) if a[-1 - i] != b[-1 - i]), least - begin)
    one, other = a[begin : len(a) - end], b[begin : len(b) - end]
    pairs = [(i, i) for i in range(begin)]
    count = Counter(other)
    if sum(count[key] for key in one) <= _MATCHED:
        for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
            pairs += [(begin + block.a + k, begin + block.b + k) for k in range(block.size)]
    return pairs + [(len(a) - end + k, len(b) - end + k) for k in range(end)]
