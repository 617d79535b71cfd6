"""Every formula that folds the elements of a word at once, over all patterns and on both paths, against arithmetic."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
import torch

from support import cuda_emulation, oracle

dtypes = pytest.mark.parametrize(
    "dtype", cuda_emulation.FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
paths = pytest.mark.parametrize("pairs", [False, True], ids=["words", "pairs"])
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def fold(dtype: torch.dtype, pairs: bool, raw: np.ndarray, function: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, 3) and counts (n, 2) of the n vectors or elements in `raw`, which starts on a 16-byte boundary."""
    count = len(raw)
    memory = torch.empty(raw.nbytes, dtype=torch.uint8)  # torch aligns to 64 bytes, numpy to less
    memory.numpy()[:] = raw.reshape(-1).view(np.uint8)
    rows, counts = np.empty((count, 3)), np.empty((count, 2), dtype=np.uint32)
    pointers = [ctypes.c_void_p(rows.ctypes.data), ctypes.c_void_p(counts.ctypes.data)]
    data = ctypes.c_void_p(memory.data_ptr())
    library = cuda_emulation.build("lanes.cpp")
    getattr(library, function)(
        cuda_emulation.FORMATS[dtype], int(pairs), data, ctypes.c_int64(count), *pointers
    )
    return rows, counts


def values(dtype: torch.dtype, raw: np.ndarray) -> np.ndarray:
    if dtype in oracle.FORMATS:
        return oracle.decode(dtype, raw)
    if dtype is torch.bool:
        return (raw != 0).astype(np.float64)
    signed = str(dtype).startswith("torch.int")
    return raw.view(f"i{raw.itemsize}" if signed else f"u{raw.itemsize}").astype(np.float64)


def assert_folded(dtype: torch.dtype, pairs: bool, elements: np.ndarray, function: str) -> None:
    """`elements` has one vector, or one element, a row."""
    rows, counts = fold(dtype, pairs, elements, function)
    sizes, finite, zeros, smalls = expected(dtype, elements)
    np.testing.assert_array_equal(
        rows[:, 0], sizes.min(axis=1)
    )  # of numpy's too one nan makes the minimum nan
    np.testing.assert_array_equal(rows[:, 1], sizes.max(axis=1))
    np.testing.assert_array_equal(rows[:, 2] != 0, finite)
    if dtype is not torch.float8_e8m0fnu:  # it has no zero, and its count is dropped later
        np.testing.assert_array_equal(counts[finite, 0], zeros[finite])
    # Only floats with subnormals have a smallest normal.
    if dtype in oracle.FORMATS and dtype is not torch.float8_e8m0fnu:
        np.testing.assert_array_equal(counts[finite, 1], smalls[finite])


def expected(
    dtype: torch.dtype, elements: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    sizes = np.abs(values(dtype, elements.reshape(-1)).reshape(elements.shape))
    smallest_normal = oracle.FORMATS[dtype].smallest_normal if dtype in oracle.FORMATS else 0.0
    with np.errstate(invalid="ignore"):
        smalls = (sizes < smallest_normal).sum(axis=1)
    return sizes, np.isfinite(sizes).all(axis=1), (sizes == 0).sum(axis=1), smalls


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


@paths
@dtypes
def test_every_half_and_every_pair_of_bytes(dtype: torch.dtype, pairs: bool) -> None:
    """No lane sees its neighbour: a word's range and counts are those of its elements, for every pair of them."""
    if dtype.itemsize > 2:
        pytest.skip("a word of 32 bits or more is one element: the test of random bits has it")
    vectors = every_pair(dtype.itemsize)
    assert_folded(dtype, pairs, vectors & np.uint8(1) if dtype is torch.bool else vectors, "lanes_fold")


@paths
@dtypes
def test_random_bits_and_the_ends_of_the_format(dtype: torch.dtype, pairs: bool) -> None:
    """Vectors of any bits, and of codes next to zero, to the smallest normal and to inf, of either sign."""
    width = dtype.itemsize
    generator = np.random.default_rng(width)
    patterns = generator.integers(0, 256, (4096, 16), dtype=np.uint8).view(RAW[width])
    bits = 8 * width
    starts = [0, 1 << (bits - 1)]
    if dtype in oracle.FORMATS:
        form = oracle.FORMATS[dtype]
        starts += [1 << form.fraction_bits, ((1 << form.exponent_bits) - 1) << form.fraction_bits]
    edges = [
        (start + step + sign) % (1 << bits)
        for start in starts
        for step in range(-2, 3)
        for sign in starts[:2]
    ]
    drawn = generator.choice(np.array(edges, dtype=np.uint64), (4096, 16 // width)).astype(RAW[width])
    both = np.concatenate([patterns, drawn])
    assert_folded(dtype, pairs, both & np.uint8(1) if dtype is torch.bool else both, "lanes_fold")


@paths
@dtypes
def test_an_element_alone(dtype: torch.dtype, pairs: bool) -> None:
    """An element of a head, a tail or a gather counts once, however many lanes it fills."""
    width = dtype.itemsize
    count = 1 << 16
    raw = np.arange(count, dtype=np.uint64)
    if width > 2:  # the ends of the word instead of all of it
        raw = np.concatenate([raw, raw << np.uint64(8 * width - 16)])
    raw = raw % 2 if dtype is torch.bool else raw
    assert_folded(dtype, pairs, raw.astype(RAW[width])[:, None], "lanes_fold_singly")


def test_division_by_multiplication() -> None:
    """The quotient of any two numbers below 2^31 is exact."""
    generator = np.random.default_rng(0)
    edges = [
        1,
        2,
        3,
        5,
        7,
        10,
        641,
        (1 << 16) - 1,
        1 << 16,
        (1 << 30) - 1,
        1 << 30,
        (1 << 31) - 2,
        (1 << 31) - 1,
    ]
    drawn = (1 << generator.integers(0, 31, 200)) + generator.integers(0, 1 << 20, 200)
    divisors = np.array([*edges, *np.minimum(drawn, (1 << 31) - 1)], dtype=np.uint32)
    numbers = np.concatenate([np.array([0, *edges]), generator.integers(0, 1 << 31, 500)])
    multiples = (divisors[:, None].astype(np.int64) * np.arange(1, 50)).reshape(-1)
    numbers = np.concatenate([numbers, multiples - 1, multiples])
    numbers = numbers[numbers < 1 << 31].astype(np.uint32)
    n, d = (np.ascontiguousarray(grid.reshape(-1)) for grid in np.meshgrid(numbers, divisors))
    quotients = np.empty_like(n)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (n, d)]
    library = cuda_emulation.build("lanes.cpp")
    library.lanes_divide(*pointers, ctypes.c_int64(len(n)), ctypes.c_void_p(quotients.ctypes.data))
    np.testing.assert_array_equal(quotients, n // d)
