"""Alignment of two sequences of calls, though modules were added, removed, swapped or renamed.

`align_calls` aligns by keys, from the strictest to the loosest, as a diff of two texts does it. `nanwatch compare` uses
it too. `align` aligns the rows of two traces: batches that made the same calls, as nearly all do, are compared as
arrays. For the others the calls are aligned once for each pair of patterns: first calls of the same module and class;
then, between those, calls of the same class and with the same labels (a module put into a Sequential renames all behind
it); at last calls of the same name (a module that was swapped).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from ..util.progress import Tell, silent

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Pairs: TypeAlias = "list[tuple[int, int]]"
Levels: TypeAlias = "Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]"

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

    def calls(self) -> list[tuple[int, int, int, tuple[int, ...], int]]:
        """Return module, class, recomputed, records and first row of each call of one batch."""
        bounds = [0, *(np.flatnonzero(self.call[1:] != self.call[:-1]) + 1).tolist(), len(self.call)]
        columns = (self.module, self.kind, self.again, self.record)
        module, kind, again, record = (column.tolist() for column in columns)
        return [
            (module[at], kind[at], again[at], tuple(record[at:until]), at) for at, until in pairwise(bounds)
        ]


def align(a: Rows, b: Rows, batches: Sequence[tuple[int, int]], tell: Tell = silent) -> tuple[Ints, Ints]:
    """Return the rows of `a` and the rows of `b` that match them, for these pairs of batches, in the order of `a`.

    On each side the rows of a batch stand together, and those of a call.
    """
    patterns = a.patterns(), b.patterns()
    known: dict[tuple[bytes, bytes], tuple[Ints, Ints]] = {}
    rows: list[tuple[Ints, Ints]] = [(np.empty(0, np.int64),) * 2]
    numbers = np.array(batches, np.int64).reshape(-1, 2).T
    sides = zip((a, b), numbers, strict=True)
    bounds = [
        np.searchsorted(side.batch, column + past).tolist() for side, column in sides for past in (0, 1)
    ]
    for done, (start_a, end_a, start_b, end_b) in enumerate(zip(*bounds, strict=True)):
        tell("aligning", done, len(batches), "batches")
        pattern_a, pattern_b = patterns[0][start_a:end_a], patterns[1][start_b:end_b]
        if np.array_equal(pattern_a, pattern_b):
            rows.append((np.arange(start_a, end_a), np.arange(start_b, end_b)))
            continue
        key = (pattern_a.tobytes(), pattern_b.tobytes())
        if key not in known:
            known[key] = _align_batch(a.part(start_a, end_a), b.part(start_b, end_b))
        rows.append((known[key][0] + start_a, known[key][1] + start_b))
    rows_a, rows_b = map(np.concatenate, zip(*rows, strict=True))
    return rows_a, rows_b


def _align_batch(a: Rows, b: Rows) -> tuple[Ints, Ints]:
    """Return the matching rows of two batches, counted from the first of each."""
    calls = a.calls(), b.calls()
    slices = (slice(0, 3), slice(1, 4), slice(0, 1))
    levels = [([call[part] for call in calls[0]], [call[part] for call in calls[1]]) for part in slices]
    rows: Pairs = []
    for i, j in align_calls(levels):
        *_, records_a, start_a = calls[0][i]
        *_, records_b, start_b = calls[1][j]
        if records_a == records_b:
            rows += [(start_a + k, start_b + k) for k in range(len(records_a))]
            continue
        place = {record: start_b + k for k, record in enumerate(records_b)}
        rows += [(start_a + k, place[record]) for k, record in enumerate(records_a) if record in place]
    both = np.array(sorted(rows), np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def align_calls(levels: Levels, fits: Callable[[int, int], bool] | None = None) -> Pairs:
    """Return the matching calls of two sequences as positions, each at most once.

    A level has a key for each call of A, and for each of B. Calls with equal keys match in their order, of a looser
    level only between those of the stricter ones. Then calls between these match, in their order, that `fits` accepts,
    and at last those that have the strictest key alike, in any order.
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
    for from_a, to_a, from_b, to_b in gaps:
        for i in range(from_a, to_a) if fits is not None else ():
            if (j := next((j for j in range(from_b, to_b) if fits and fits(i, j)), None)) is not None:
                pairs.append((i, j))
                from_b = j + 1
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
    middle_a, middle_b = a[begin : len(a) - end], b[begin : len(b) - end]
    pairs = [(i, i) for i in range(begin)]
    count = Counter(middle_b)
    if sum(count[key] for key in middle_a) <= _MATCHED:
        for block in SequenceMatcher(None, middle_a, middle_b, autojunk=False).get_matching_blocks():
            pairs += [(begin + block.a + k, begin + block.b + k) for k in range(block.size)]
    return pairs + [(len(a) - end + k, len(b) - end + k) for k in range(end)]
