"""All 2^32 patterns of float32, and a million corruptions of a tensor."""

from __future__ import annotations

import numpy as np
import torch

import nanwatch
from support.corruptions import missed
from support.implementations import IMPLEMENTATIONS, active, missing
from support.oracle import assert_rows


def test_all_fp32_patterns() -> None:
    """All 2^32 patterns of fp32: the range of shuffled blocks of 16384, and the counts of each 2^24."""
    block, chunk = 1 << 14, 1 << 24
    names = [name for name in IMPLEMENTATIONS if not missing(name)]
    # Odd, so a bijection of the block: what is a neighbour in the format is not one in memory.
    shuffle = (np.arange(block, dtype=np.uint32) * 1517) % block
    for start in range(0, 1 << 32, chunk):
        patterns = np.arange(start, start + chunk, block, dtype=np.uint32)[:, None] + shuffle
        values = patterns.view(np.float32)
        size, finite = np.abs(values), np.isfinite(values)
        want = np.stack([size.min(axis=1), size.max(axis=1), finite.all(axis=1)], axis=1).astype(np.float64)
        counts = (
            np.isnan(values).sum(),
            (values == np.inf).sum(),
            (values == -np.inf).sum(),
            (values == 0).sum(),
            ((patterns & 0x7FFF_FFFF) < 0x0080_0000).sum() - (values == 0).sum(),
        )
        x = torch.from_numpy(values)
        for name in names:
            with active(name) as implementation:
                placed = implementation.place(x)
                what = f"{name} from {start:#x}"
                assert_rows(implementation.abs_ranges(list(placed.unbind())), want, what)
                # The reference's counts take 0.5 s a chunk: some chunks and both ends of each sign.
                if name != "reference" or (start // chunk) % 16 in (0, 15):
                    assert implementation.tensor_health(placed)[5:10] == counts, what


def test_a_million_corruptions_are_seen() -> None:
    """No corruption goes unseen in 16 matrices, of less than a block of the hash to ten of them."""
    for seed in range(16):
        shape = ((6, 5), (24, 20), (64, 40), (17, 61))[seed % 4]
        assert missed(shape, 62_500, seed, nanwatch.fingerprint) == []
