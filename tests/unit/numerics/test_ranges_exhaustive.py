"""Every bit pattern of every format of 8 and 16 bits, and all 2^32 of fp32, in every place of the vector code."""

import math

import numpy as np
import pytest
import torch

from support.implementations import Implementation
from support.oracle import FLOATS, FLOATS_8, FLOATS_16, FORMATS, assert_rows, decode, from_patterns

SMALL = (*FLOATS_8, *FLOATS_16)


def all_patterns(dtype: torch.dtype) -> np.ndarray:
    return np.arange(1 << (8 * dtype.itemsize), dtype=np.uint32).astype(f"u{dtype.itemsize}")


def ranges_with_ones(values: np.ndarray) -> np.ndarray:
    """The range rows, shape (n, 3), of each value among ones."""
    size = np.abs(values)
    rows = np.stack([np.minimum(size, 1.0), np.maximum(size, 1.0), np.isfinite(values)], axis=1)
    rows[np.isnan(values), :2] = math.nan
    return rows


def one(dtype: torch.dtype) -> int:
    """The bits of 1.0."""
    form = FORMATS[dtype]
    return form.bias << form.fraction_bits


@pytest.mark.parametrize("dtype", SMALL)
def test_each_pattern_alone_in_health(implementation: Implementation, dtype: torch.dtype) -> None:
    """Each pattern falls into exactly the classes that its decoded value says."""
    patterns = all_patterns(dtype)
    if implementation.name != "native-baseline" and dtype.itemsize == 2:
        patterns = patterns[::17]  # a single element is read by the same code at every level
    values = decode(dtype, patterns)
    size, finite = np.abs(values), np.isfinite(values)
    want = np.stack(
        [
            size,
            size,
            finite,
            np.where(finite, size, math.inf),
            np.where(finite, size, 0.0),
            np.isnan(values),
            values == math.inf,
            values == -math.inf,
            values == 0,
            (size > 0) & (size < FORMATS[dtype].smallest_normal),
            np.ones(len(values)),
            np.where(finite, -1, 0),
        ],
        axis=1,
    )
    got = []
    for x in implementation.place(from_patterns(patterns, dtype)).unbind():
        health = implementation.tensor_health(x)
        got.append((*health[:-1], -1 if health.first_nonfinite is None else 0))
    assert_rows(got, want, str(dtype))


def boundary_patterns(dtype: torch.dtype) -> np.ndarray:
    """Patterns round each power of two, where a compare could be off by one."""
    width = 8 * dtype.itemsize
    magnitudes = {0, (1 << (width - 1)) - 1}
    for bit in range(width - 1):
        magnitudes |= {1 << bit, (1 << bit) - 1, (1 << bit) + 1}
    form = FORMATS[dtype]
    top = ((1 << form.exponent_bits) - 1) << form.fraction_bits
    magnitudes |= {top - 1, top, min(top + 1, (1 << (width - 1)) - 1), 1 << form.fraction_bits}
    chosen = sorted({m | sign << (width - 1) for m in magnitudes for sign in (0, 1)})
    return np.array(chosen, dtype=f"u{dtype.itemsize}")


@pytest.mark.parametrize("dtype", FLOATS)
def test_patterns_at_each_place(implementation: Implementation, dtype: torch.dtype) -> None:
    """Among ones each pattern is seen at every place: in head, unrolled body, vector body and tail."""
    patterns, length = (all_patterns(dtype), 600) if dtype in FLOATS_8 else (boundary_patterns(dtype), 70)
    block = np.full(length, one(dtype), patterns.dtype)
    x = from_patterns(block, dtype)
    want = ranges_with_ones(decode(dtype, patterns))
    for place in range(length) if implementation.is_native else (0, length // 2, length - 1):
        got = []
        for pattern in patterns:
            block[place] = pattern
            got.append(implementation.abs_range(implementation.place(x)))
        block[place] = one(dtype)
        assert_rows(got, want, f"{dtype} at {place}")
