"""Alignment of two sequences of calls, though modules were added, removed, swapped or renamed.

`align_calls` aligns by keys, from the strictest to the loosest, as a diff of two texts does it. `nanwatch compare` uses
it too. `align` aligns the rows of two traces: the calls are aligned once for each pair of patterns, as nearly all
batches make the same calls. First calls of the same module and class match; then, between those, calls of the same
class and with the same labels (a module put into a Sequential renames all behind it); at last calls of the same name (a
module that was swapped).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from ..util.messages import Tell, silent

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Pairs: TypeAlias = "list[tuple[int, int]]"
Levels: TypeAlias = "Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]"

# SequenceMatcher takes time for each pair of equal calls. Beyond half a second of it, calls of modules that are called
# more than once are matched by their order alone.
_MATCHED = 400_000


def align(a: Ints, b: Ints, batches: Sequence[tuple[int, int]], tell: Tell = silent) -> tuple[Ints, Ints]:
    """Return the rows of `a` and the rows of `b` that match them, for these pairs of batches, in the order of `a`.

    A row is the number of its batch, whether it begins a call, its module and its class, whether it was recomputed, and
    its record (role and label), in numbers that mean the same on both sides. The rows of a batch stand together, and
    those of a call.
    """
    known: dict[tuple[bytes, bytes], Ints] = {}
    rows: list[Ints] = [np.empty((0, 2), np.int64)]
    for done, pair in enumerate(batches):
        tell("aligning", done, len(batches), "batches")
        bounds = [np.searchsorted(x[:, 0], (batch, batch + 1)) for x, batch in zip((a, b), pair, strict=True)]
        parts = [x[start:end, 1:] for x, (start, end) in zip((a, b), bounds, strict=True)]
        key = parts[0].tobytes(), parts[1].tobytes()
        if key not in known:
            known[key] = _align_batch(*parts)
        rows.append(known[key] + [start for start, _ in bounds])
    pairs = np.concatenate(rows)
    return pairs[:, 0], pairs[:, 1]


def _align_batch(*parts: Ints) -> Ints:
    """Return the matching rows of two batches, of shape (pairs, 2), counted from the first of each."""
    sides = []
    for numbers in parts:
        bounds = [*np.flatnonzero(numbers[:, 0]).tolist(), len(numbers)]
        heads, records = numbers[:, 1:4].tolist(), numbers[:, 4].tolist()
        sides.append([(*heads[start], tuple(records[start:end]), start) for start, end in pairwise(bounds)])
    slices = (slice(0, 3), slice(1, 4), slice(0, 1))
    levels = [([call[part] for call in sides[0]], [call[part] for call in sides[1]]) for part in slices]
    rows: Pairs = []
    for i, j in align_calls(levels):
        *_, records_a, start_a = sides[0][i]
        *_, records_b, start_b = sides[1][j]
        if records_a == records_b:
            rows += [(start_a + k, start_b + k) for k in range(len(records_a))]
            continue
        place = {record: start_b + k for k, record in enumerate(records_b)}
        rows += [(start_a + k, place[record]) for k, record in enumerate(records_a) if record in place]
    return np.array(sorted(rows), np.int64).reshape(-1, 2)


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
            for i, j in [*inside, (to_a, to_b)]:
                if i > from_a and j > from_b:
                    smaller.append((from_a, i, from_b, j))
                from_a, from_b = i + 1, j + 1
        gaps = smaller
    for from_a, to_a, from_b, to_b in gaps:
        for i in range(from_a, to_a) if fits is not None else ():
            match = next((j for j in range(from_b, to_b) if fits and fits(i, j)), None)
            if match is not None:
                pairs.append((i, match))
                from_b = match + 1
    # Modules that were moved, so that no order brings them together.
    left_a = set(range(len(strict_a))) - {i for i, _ in pairs}
    waiting = defaultdict(list)
    for j in sorted(set(range(len(strict_b))) - {j for _, j in pairs}, reverse=True):
        waiting[strict_b[j]].append(j)
    pairs += [(i, waiting[strict_a[i]].pop()) for i in sorted(left_a) if waiting[strict_a[i]]]
    return sorted(pairs)


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
