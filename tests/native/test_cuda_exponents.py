"""The CUDA kernels of exponents and edges on the host: every format, stride, alignment and order of blocks.

The very source that nvcc compiles runs here (see cuda_emulation.py). Races and memory ordering are not tested.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings

from nanwatch.numerics import _reference
from support.cuda_emulation import FORMATS, DescribedTensor, Host, describe
from support.cuda_tensors import random_bits
from support.strategies import views

BLOCKS = 132 * 8  # kBlocks
FIRST_CHUNK_BYTES = 16 << 10  # kFirstChunkBytes
EDGES = 5  # kMaxEdges
INVALID_VALUE = 1
TOO_MANY_CHUNKS = -2

dtypes = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def call_exponents(host: Host, tensor: DescribedTensor, counts: torch.Tensor) -> int:
    code: int = host.library.nanwatch_cuda_exponents(
        ctypes.byref(tensor), ctypes.c_void_p(counts.data_ptr()), 0, None
    )
    return code


def exponents(host: Host, x: torch.Tensor, address: int | None = None) -> torch.Tensor:
    counts = torch.zeros(_reference.EXPONENT_HEAD + len(_reference.exponents_of(x.dtype)), dtype=torch.int64)
    assert call_exponents(host, describe(x, address), counts) == 0
    return counts


def edges(host: Host, x: torch.Tensor, codes: Sequence[int], address: int | None = None) -> torch.Tensor:
    counts = torch.zeros(len(codes), dtype=torch.int64)
    array = (ctypes.c_uint64 * len(codes))(*codes)
    error = host.library.nanwatch_cuda_edges(
        ctypes.byref(describe(x, address)),
        array,
        ctypes.c_int64(len(codes)),
        ctypes.c_void_p(counts.data_ptr()),
        0,
        None,
    )
    assert error == 0
    return counts


def codes_for(x: torch.Tensor) -> list[int]:
    """Codes low, in the middle, at the end of the word and beyond it."""
    top = 1 << (8 * x.element_size())
    return [0, 1, top // 3, min(top - 1, (1 << 63) - 1), min(top, (1 << 63) - 1)]


def check(host: Host, x: torch.Tensor) -> None:
    assert torch.equal(exponents(host, x), _reference.exponent_histogram(x))
    codes = codes_for(x)
    assert torch.equal(edges(host, x, codes), _reference.count_from(x, codes))


@dtypes
@pytest.mark.parametrize("count", [1, 15, 17, 255, 4097, 40_000])
def test_sizes_around_a_vector_and_a_chunk(host: Host, dtype: torch.dtype, count: int) -> None:
    """A run of any length gives the reference's counts, whatever its bits."""
    check(host, random_bits(dtype, count))


@pytest.mark.parametrize("dtype", [d for d in FORMATS if d.itemsize <= 2 and d is not torch.bool])
def test_every_pattern(host: Host, dtype: torch.dtype) -> None:
    """All patterns of a small format, together."""
    bits = torch.arange(256**dtype.itemsize).to(torch.uint8 if dtype.itemsize == 1 else torch.int32)
    words = bits if dtype.itemsize == 1 else (bits - (1 << 15)).to(torch.int16)
    check(host, words.view(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_exponent_of_a_wide_format(host: Host, dtype: torch.dtype) -> None:
    """Every power of two, and what lies just below and above it."""
    low = _reference.exponents_of(dtype)
    values = torch.ldexp(torch.ones(len(low), dtype=torch.float64), torch.tensor(list(low))).to(dtype)
    up, down = (torch.nextafter(values, torch.full_like(values, end)) for end in (float("inf"), 0.0))
    check(host, torch.cat([values, -up, down]))


@settings(max_examples=40)
@given(x=views())
def test_any_view(host: Host, x: torch.Tensor) -> None:
    """Any dtype, strides, offset, overlap and alignment: rows, vectors, single elements and the plain way."""
    check(host, x)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :600],
        lambda x: x[:, 1:700],
        lambda x: x[:, :32],
        lambda x: x[::2, ::3],
        lambda x: x.t()[:500],
        lambda x: x.expand(3, *x.shape)[:, :, :64],
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_each_way_to_read_strides(host: Host, dtype: torch.dtype, view: object) -> None:
    """Long rows, short rows on and off the boundaries, lone elements, and repeats."""
    assert callable(view)
    check(host, view(random_bits(dtype, 40 * 1000).view(40, 1000)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_memory_misaligned_for_its_own_element(host: Host, dtype: torch.dtype) -> None:
    """Memory from another library may start at an odd address; no load may be wider than its alignment."""
    x = random_bits(dtype, 100)
    moved = torch.zeros(100 * dtype.itemsize + 1, dtype=torch.uint8)
    moved[1:] = x.view(torch.uint8)
    address = moved.data_ptr() + 1
    assert torch.equal(exponents(host, x, address), _reference.exponent_histogram(x))
    assert torch.equal(edges(host, x, [1, 2], address), _reference.count_from(x, [1, 2]))


def test_blocks_take_several_chunks_in_any_order(host: Host) -> None:
    """More chunks than blocks: each block goes on, and the sum is that of all."""
    x = torch.ones(BLOCKS * FIRST_CHUNK_BYTES * 2 // 4 + 5, dtype=torch.float32)[1:]
    x[::100_003] = 0.25
    want = torch.zeros(_reference.EXPONENT_HEAD + 277, dtype=torch.int64)
    rare = len(x[::100_003])
    want[_reference.EXPONENT_HEAD + 149 - 2], want[_reference.EXPONENT_HEAD + 149] = rare, len(x) - rare
    host.shuffle_blocks(3)
    host.blocks()
    assert torch.equal(exponents(host, x), want)
    assert BLOCKS // 2 < host.blocks() <= BLOCKS
    assert edges(host, x, [0x3F000000]).tolist() == [len(x) - rare]
    host.shuffle_blocks(0)


def test_counts_are_added_to_what_is_there(host: Host) -> None:
    """Two calls into the same memory are the histogram of both."""
    x, y = random_bits(torch.bfloat16, 1000), random_bits(torch.bfloat16, 1000, seed=1)
    counts = torch.zeros_like(exponents(host, x))
    for each in (x, y):
        assert call_exponents(host, describe(each), counts) == 0
    assert torch.equal(counts, _reference.exponent_histogram(torch.cat([x, y])))


def test_an_empty_tensor_launches_nothing(host: Host) -> None:
    """There is nothing to read and nothing to add."""
    host.launches()
    assert not exponents(host, torch.empty(0, 3)).any()
    assert host.launches() == 0


def test_what_cannot_be_read_is_a_code(host: Host) -> None:
    """More elements than 32-bit counters hold, and a launch that fails, are codes and leave nothing pending."""
    endless = DescribedTensor(
        0, (ctypes.c_int64 * 1)(1 << 62), (ctypes.c_int64 * 1)(1), 1, FORMATS[torch.uint8]
    )
    counts = torch.zeros(100, dtype=torch.int64)
    assert call_exponents(host, endless, counts) == TOO_MANY_CHUNKS
    host.library.cuda_host_fail_next(INVALID_VALUE)
    assert call_exponents(host, describe(torch.ones(3)), counts) == INVALID_VALUE
    assert host.library.cuda_host_pending_error() == 0
