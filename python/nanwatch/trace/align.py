"""Alignment of two sequences of calls, though modules were added, removed, swapped or renamed.

`align_calls` aligns by keys, from the strictest to the loosest, as a diff of two texts does it. `align` aligns the rows
of two traces: batches that made the same calls, as nearly all do, are compared as arrays. For the others the calls are
aligned once for each pair of patterns: first calls of the same module and class; then, between those, calls of the same
class and with the same labels (a module put into a Sequential renames all behind it); at last calls of the same name (a
module that was swapped).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from ..util.progress import Tell, silent

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Pairs: TypeAlias = "list[tuple[int, int]]"
# Module, class, whether it was recomputed, and records.
CallKey: TypeAlias = "tuple[int, int, int, tuple[int, ...]]"

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

    def part(self, start: int, end: int) -> Rows:
        """Return some of the rows."""
        return Rows(*(getattr(self, column.name)[start:end] for column in fields(self)))

    def calls(self) -> list[tuple[CallKey, int]]:
        """Return the calls of one batch, each with its first row."""
        bounds = [0, *(np.flatnonzero(self.call[1:] != self.call[:-1]) + 1).tolist(), len(self.call)]
        columns = (self.module, self.kind, self.again, self.record)
        module, kind, again, record = (column.tolist() for column in columns)
        return [
            ((module[at], kind[at], again[at], tuple(record[at:until])), at) for at, until in pairwise(bounds)
        ]


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
            known[key] = _align_batch(a.part(start_a, end_a), b.part(start_b, end_b))
        rows_a, rows_b = known[key]
        found_a.append(rows_a + start_a)
        found_b.append(rows_b + start_b)
    none = np.empty(0, np.int64)
    return np.concatenate([none, *found_a]), np.concatenate([none, *found_b])


def _align_batch(a: Rows, b: Rows) -> tuple[Ints, Ints]:
    """Return the matching rows of two batches, counted from the first of each."""
    calls_a, calls_b = a.calls(), b.calls()
    keys = [[(key[:3], key[1:], key[0]) for key, _ in calls] for calls in (calls_a, calls_b)]
    levels = [([key[i] for key in keys[0]], [key[i] for key in keys[1]]) for i in range(3)]
    rows: Pairs = []
    for i, j in align_calls(levels):
        (*_, records_a), start_a = calls_a[i]
        (*_, records_b), start_b = calls_b[j]
        if records_a == records_b:
            rows += [(start_a + k, start_b + k) for k in range(len(records_a))]
            continue
        place = {record: start_b + k for k, record in enumerate(records_b)}
        rows += [(start_a + k, place[record]) for k, record in enumerate(records_a) if record in place]
    both = np.array(sorted(rows), np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def align_calls(levels: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> Pairs:
    """Return the matching calls of two sequences as positions, each at most once.

    A level has a key for each call of A, and for each of B. Calls with equal keys match in their order, of a looser
    level only between those of the stricter ones. At last calls match that have the strictest key alike, in any order.
    """
    strict_a, strict_b = levels[0]
    pairs: Pairs = []
    gaps = [(0, len(strict_a), 0, len(strict_b))]
    for keys_a, keys_b in levels:
        smaller = []
        for from_a, to_a, from_b, to_b in gaps:
            common = _common(keys_a[from_a:to_a], keys_b[from_b:to_b])
            inside = [(i + from_a, j + from_b) for i, j in common]
            pairs += inside
            smaller += _between(inside, (from_a, to_a, from_b, to_b))
        gaps = smaller
    # Modules that were moved, so that no order brings them together.
    left_a = set(range(len(strict_a))) - {i for i, _ in pairs}
    waiting = defaultdict(list)
    for j in sorted(set(range(len(strict_b))) - {j for _, j in pairs}, reverse=True):
        waiting[strict_b[j]].append(j)
    pairs += [(i, waiting[strict_a[i]].pop()) for i in sorted(left_a) if waiting[strict_a[i]]]
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


def _common(a: Sequence[Hashable], b: Sequence[Hashable]) -> Pairs:
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
