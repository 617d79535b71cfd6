"""All 2^32 patterns of float32, and a million corruptions of a tensor."""

from __future__ import annotations

import numpy as np
import torch

from support.implementations import IMPLEMENTATIONS, active, missing
from support.oracle import assert_rows

_INF = 0x7F80_0000  # the pattern of infinity: those below are finite, those above are nan
_NORMAL = 0x0080_0000  # of the smallest normal number


def _ranges(magnitudes: np.ndarray, block: int) -> np.ndarray:
    """Return the range of each block of patterns that follow each other, the first of which is given.

    IEEE 754 orders magnitudes as the integers that are their patterns: the first is the least and the last the largest.
    """
    last = magnitudes + np.uint32(block - 1)
    is_nan, is_finite = last > _INF, last < _INF
    ends = [np.where(is_nan, np.nan, end.view(np.float32)) for end in (magnitudes, last)]
    return np.stack([*ends, is_finite], axis=1).astype(np.float64)


def test_all_fp32_patterns() -> None:
    """All 2^32 patterns of fp32 in each native level: the range of shuffled blocks of 16384, counts of each 2^24."""
    block, chunk = 1 << 14, 1 << 24
    names = [name for name in IMPLEMENTATIONS if not missing(name)]
    # Odd, so a bijection of the block: what is a neighbour in the format is not one in memory.
    shuffle = (np.arange(block, dtype=np.uint32) * 1517) % block
    starts = np.arange(0, chunk, block, dtype=np.uint32)
    first_chunk = starts[:, None] + shuffle
    patterns = np.empty_like(first_chunk)
    x = torch.from_numpy(patterns.view(np.float32))
    for start in range(0, 1 << 32, chunk):
        np.add(first_chunk, np.uint32(start), out=patterns)
        magnitude = start & 0x7FFF_FFFF
        want = _ranges(starts + np.uint32(magnitude), block)

        def count(low: int, high: int, magnitude: int = magnitude) -> int:
            return len(range(max(low, magnitude), min(high, magnitude + chunk)))

        infs, is_negative = count(_INF, _INF + 1), start >= 1 << 31
        signed = (0, infs) if is_negative else (infs, 0)
        counts = (count(_INF + 1, 1 << 31), *signed, count(0, 1), count(1, _NORMAL))
        for name in names:
            # The reference has no tricks with bits, and takes 1 s a chunk: some chunks, and both ends of each sign.
            if name == "reference" and (start // chunk) % 16 not in (0, 15):
                continue
            with active(name) as implementation:
                placed = implementation.place(x)
                what = f"{name} from {start:#x}"
                assert_rows(implementation.abs_ranges(list(placed.unbind())), want, what)
                assert implementation.tensor_health(placed)[5:10] == counts, what
