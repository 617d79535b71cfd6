"""The CUDA kernel on the host, over tensors that are one run in memory: heads, bodies, tails, chunks and meetings.

The very source that nvcc compiles runs here (see cuda_emulation.py). Races and memory ordering are not tested.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from nanwatch.numerics import _reference
from support.cuda_emulation import FORMATS, DescribedTensor, Host, describe, same
from support.cuda_tensors import assert_matches, random_bits, random_finite

MIN_CHUNK_BYTES = 16 << 10  # kMinChunkBytes
WANTED_CHUNKS = 2048  # kWantedChunks
FEW, MANY = 16, 1024  # tensors in a launch
INVALID_VALUE = 1
TOO_MANY_CHUNKS = -2

dtypes = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))


@dtypes
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 33, 255, 4097])
def test_sizes_around_a_vector_and_a_block(host: Host, dtype: torch.dtype, count: int) -> None:
    """A run of any length gives the reference's row, whatever its bits."""
    assert_matches(host, random_bits(dtype, count))
    assert_matches(host, random_finite(dtype, count))


@dtypes
def test_every_alignment(host: Host, dtype: torch.dtype) -> None:
    """A run may start at any element of a 16-byte vector."""
    x = random_finite(dtype, 80)
    for start in range(16 // dtype.itemsize + 1):
        assert_matches(host, x[start:-3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_memory_misaligned_for_its_own_element(host: Host, dtype: torch.dtype) -> None:
    """Memory from another library may start at an odd address; no load may be wider than its alignment."""
    x = random_finite(dtype, 100)
    moved = torch.zeros(100 * dtype.itemsize + 1, dtype=torch.uint8)
    moved[1:] = x.view(torch.uint8)
    rows = torch.empty((1, 3), dtype=torch.float64)
    assert host.call_ranges([describe(x, moved.data_ptr() + 1)], rows) == 0
    assert same(rows[0], _reference.abs_range(x))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("head", [0, 1])
def test_chunks_cover_a_large_run(host: Host, dtype: torch.dtype, extra: int, head: int) -> None:
    """The first and last element of every chunk are read exactly once, wherever the run begins and ends."""
    per_chunk = MIN_CHUNK_BYTES // dtype.itemsize
    x = torch.ones(4 * per_chunk).to(dtype)[head : head + 3 * per_chunk + extra]
    to_boundary = (-head) % (16 // dtype.itemsize)  # goes with the first chunk
    chunks = [to_boundary + k * per_chunk for k in range(1, 4)]
    edges = [0, *(edge + side for edge in chunks for side in (-1, 0)), len(x) - 1]
    edges = sorted({edge for edge in edges if edge < len(x)})
    x[edges] = 0
    host.blocks()
    assert host.health(x)[8] == len(edges)
    assert host.blocks() == max(1, -(-(len(x) - to_boundary) // per_chunk))
    for edge in edges:
        x.fill_(1)
        x[edge] = 3
        assert host.ranges([x])[0].tolist() == [1, 3, 1]


def test_chunks_grow_with_the_tensor(host: Host) -> None:
    """A large tensor takes some two thousand blocks, not one for each of the smallest chunks."""
    x = torch.ones(WANTED_CHUNKS * MIN_CHUNK_BYTES + 1, dtype=torch.uint8)
    for position, value in ((0, 7), (2 * MIN_CHUNK_BYTES - 1, 8), (2 * MIN_CHUNK_BYTES, 9), (len(x) - 1, 0)):
        x[position] = value
    host.blocks()
    assert host.ranges([x])[0].tolist() == [0, 9, 1]
    assert host.blocks() == WANTED_CHUNKS // 2 + 1


def test_blocks_may_come_in_any_order(host: Host) -> None:
    """Whichever block is last writes the row, and the workspace is zero for the next call."""
    xs = [random_finite(torch.bfloat16, 100_000, seed=1), random_finite(torch.float64, 5000), torch.empty(0)]
    rows = torch.stack([_reference.abs_range(x) for x in xs])
    for seed in range(1, 6):
        host.shuffle_blocks(seed)
        assert same(host.ranges(xs), rows)
        assert same(host.health(xs[0]), _reference.health(xs[0]))
    host.shuffle_blocks(0)


@pytest.mark.parametrize("where", [0, 8191, 8192, 40_000, 99_999])
def test_a_chunk_that_is_not_finite_is_counted_anew(host: Host, where: int) -> None:
    """One nan and one inf in a single chunk leave the counts of the others, and its own, right."""
    x = random_finite(torch.float16, 100_000)
    x[where] = float("nan")
    x[where // 2] = float("-inf")
    x[where // 2 + 1] = 0
    assert same(host.health(x), _reference.health(x))


@pytest.mark.parametrize("dtype", [d for d in FORMATS if d.itemsize == 1 and d != torch.bool])
def test_every_8_bit_pattern_alone(host: Host, dtype: torch.dtype) -> None:
    """Each of the 256 patterns as a tensor of its own gives the reference's row."""
    xs = list(torch.arange(256, dtype=torch.uint8).view(dtype).split(1))
    assert same(host.ranges(xs), torch.stack([_reference.abs_range(x) for x in xs]))


@pytest.mark.parametrize("dtype", [d for d in FORMATS if d.itemsize == 2])
def test_every_16_bit_pattern(host: Host, dtype: torch.dtype) -> None:
    """All 65536 patterns, in 512 tensors of 128 consecutive ones, and counted in one."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    xs = list(bits.split(128))
    assert same(host.ranges(xs), torch.stack([_reference.abs_range(x) for x in xs]))
    assert same(host.health(bits), _reference.health(bits))


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 95])
def test_many_tensors_in_one_launch(host: Host, count: int) -> None:
    """Tensors of every format and many sizes, empty ones among them, keep their order and take one launch."""
    xs = [
        random_bits(dtype, count, seed=count)
        for count in (100, 0, 1, 0, 40_000)
        for dtype in (*FORMATS, torch.float32)
    ][:count]
    host.launches()
    rows = host.ranges(xs)
    assert host.launches() == 1
    assert same(rows, torch.stack([_reference.abs_range(x) for x in xs]))


def test_more_tensors_than_fit_one_launch(host: Host) -> None:
    """Beyond the parameter limit the list is cut, and no row is lost at the cut."""
    xs = list(torch.arange(1, MANY + 3, dtype=torch.float32).split(1))
    host.launches()
    rows = host.ranges(xs)
    assert host.launches() == 2
    assert rows[:, 0].tolist() == rows[:, 1].tolist() == list(range(1, MANY + 3))


def test_no_tensors(host: Host) -> None:
    """An empty list launches nothing."""
    host.launches()
    assert host.ranges([]).shape == (0, 3)
    assert host.launches() == 0


def test_more_elements_than_a_launch_reads(host: Host) -> None:
    """A view of more chunks than a grid has blocks, which only overlaps can make, is refused with a code."""
    endless = DescribedTensor(
        0, (ctypes.c_int64 * 1)(1 << 62), (ctypes.c_int64 * 1)(1), 1, FORMATS[torch.uint8]
    )
    rows = torch.empty((1, 3), dtype=torch.float64)
    host.launches()
    assert host.call_ranges([endless], rows) == TOO_MANY_CHUNKS
    assert host.launches() == 0
    assert b"elements" in host.library.nanwatch_cuda_error(TOO_MANY_CHUNKS)


def test_a_failed_launch_is_returned_and_cleared(host: Host) -> None:
    """The error of a launch comes back to the caller and is not left for the next check of somebody else's."""
    rows = torch.empty((1, 3), dtype=torch.float64)
    host.library.cuda_host_fail_next(INVALID_VALUE)
    assert host.call_ranges([describe(torch.ones(3))], rows) == INVALID_VALUE
    assert host.library.cuda_host_pending_error() == 0


def test_a_pending_error_of_the_user_is_left_alone(host: Host) -> None:
    """An error that the user's own code left unread is neither reported as ours nor swallowed."""
    host.library.cuda_host_set_pending_error(INVALID_VALUE)
    try:
        assert host.ranges([torch.ones(3)])[0].tolist() == [1, 1, 1]
        assert host.library.cuda_host_pending_error() == INVALID_VALUE
    finally:
        host.library.cuda_host_set_pending_error(0)
