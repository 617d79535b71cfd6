"""Every formula that folds the elements of a word at once, over all patterns, against arithmetic."""

from __future__ import annotations

import ctypes
import functools
import itertools

import numpy as np
import pytest
import torch

from support import cuda_emulation, oracle
from support.cuda_emulation import dtypes

RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def fold(dtype: torch.dtype, raw: np.ndarray) -> np.ndarray:
    """Rows (n, 3) of the n vectors in `raw`."""
    memory = torch.empty(raw.nbytes, dtype=torch.uint8)  # torch aligns to 64 bytes, numpy to less
    memory.numpy()[:] = raw.reshape(-1).view(np.uint8)
    rows = np.empty((len(raw), 3))
    data, out = ctypes.c_void_p(memory.data_ptr()), ctypes.c_void_p(rows.ctypes.data)
    library = cuda_emulation.build("lanes.cpp")
    library.lanes_fold(cuda_emulation.FORMATS[dtype], data, ctypes.c_int64(len(raw)), out)
    return rows


def values(dtype: torch.dtype, raw: np.ndarray) -> np.ndarray:
    if dtype in oracle.FORMATS:
        return oracle.decode(dtype, raw)
    if dtype is torch.bool:
        return (raw != 0).astype(np.float64)
    signed = str(dtype).startswith("torch.int")
    return raw.view(f"i{raw.itemsize}" if signed else f"u{raw.itemsize}").astype(np.float64)


def assert_folded(dtype: torch.dtype, elements: np.ndarray) -> None:
    """`elements` has one vector a row."""
    rows = fold(dtype, elements)
    sizes = np.abs(values(dtype, elements.reshape(-1)).reshape(elements.shape))
    # Of numpy's too one nan makes the minimum nan.
    np.testing.assert_array_equal(rows[:, 0], sizes.min(axis=1))
    np.testing.assert_array_equal(rows[:, 1], sizes.max(axis=1))
    np.testing.assert_array_equal(rows[:, 2] != 0, np.isfinite(sizes).all(axis=1))


@functools.cache
def every_pair(width: int) -> np.ndarray:
    """Vectors that hold all 2^16 patterns of a half, so all pairs of neighbouring bytes, beside several others."""
    low = np.arange(1 << 16, dtype=np.uint32)
    beside = (0x0000, 0x8081, 0x7F80)
    words = np.concatenate([low | np.uint32(high << 16) for high in beside])
    # Every pattern in every place of a word, the word in every place of a vector.
    turned = np.stack([words << np.uint32(n) | words >> np.uint32(32 - n) for n in (8, 16, 24)], axis=1)
    vectors = np.concatenate([words[:, None], turned], axis=1)
    return np.ascontiguousarray(vectors).view(RAW[width])


@dtypes
def test_every_half_and_every_pair_of_bytes(dtype: torch.dtype) -> None:
    """No lane sees its neighbour: a word's range is that of its elements, for every pair of them."""
    if dtype.itemsize > 2:
        pytest.skip("a word of 32 bits or more is one element: the test of random bits has it")
    vectors = every_pair(dtype.itemsize)
    assert_folded(dtype, vectors & np.uint8(1) if dtype is torch.bool else vectors)


@dtypes
def test_random_bits_and_the_ends_of_the_format(dtype: torch.dtype) -> None:
    """Vectors of any bits, and of codes next to zero, to the smallest normal and to inf, of either sign."""
    width = dtype.itemsize
    generator = np.random.default_rng(width)
    patterns = generator.integers(0, 256, (4096, 16), dtype=np.uint8).view(RAW[width])
    bits = 8 * width
    starts = [0, 1 << (bits - 1)]
    if dtype in oracle.FORMATS:
        form = oracle.FORMATS[dtype]
        starts += [1 << form.fraction_bits, ((1 << form.exponent_bits) - 1) << form.fraction_bits]
    edges = [sum(terms) % (1 << bits) for terms in itertools.product(starts, range(-2, 3), starts[:2])]
    drawn = generator.choice(np.array(edges, dtype=np.uint64), (4096, 16 // width)).astype(RAW[width])
    both = np.concatenate([patterns, drawn])
    assert_folded(dtype, both & np.uint8(1) if dtype is torch.bool else both)
