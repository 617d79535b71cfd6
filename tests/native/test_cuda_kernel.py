"""The CUDA kernel on the host: heads, bodies, tails, blocks in any order, and the rows that the recorder gets.

The very source that nvcc compiles runs here (see cuda_emulation.py), on a device of four multiprocessors. Races and
memory ordering are tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nanwatch.numerics import _reference
from support import cuda_emulation
from support.cuda_emulation import FORMATS, Host, dtypes, reference, same
from support.oracle import random_finite, random_patterns
from support.stand_in_device import may_be_mask

WAVE = 8  # two blocks for each of the stand-in's four multiprocessors
FEW, MANY = 24, 512  # tensors in a launch
INVALID_VALUE = 1
INF = float("inf")


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """The emulation, with its blocks in order again afterwards."""
    emulation = cuda_emulation.host()
    yield emulation
    emulation.shuffle_blocks(0)


@dtypes
def test_sizes_and_alignments_with_blocks_in_any_order(host: Host, dtype: torch.dtype) -> None:
    """A run of any length, from any element of a 16-byte vector on, gives the reference's row, whatever its bits."""
    counts = (0, 1, 2, 15, 16, 17, 31, 33, 255, 4097)
    xs = [fill(dtype, (count,)) for fill in (random_patterns, random_finite) for count in counts]
    x = random_finite(dtype, (80,))
    xs += [x[start:-3] for start in range(16 // dtype.itemsize + 1)]
    xs += [random_finite(dtype, (100_000 // dtype.itemsize,)), random_patterns(dtype, (20_000,))]
    expected = reference(xs)
    for seed in range(3):  # whichever block is last writes the row, and leaves a workspace of zeros
        host.shuffle_blocks(seed)
        assert same(host.ranges(xs), expected)
    host.shuffle_blocks(0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kib", [16, 380, 700])  # with 380 a thread has seven vectors
def test_each_element_of_a_run_counts(host: Host, dtype: torch.dtype, kib: int) -> None:
    """One wave of blocks reads the run, and an element that differs is seen wherever it stands."""
    x = torch.ones((kib << 10) // dtype.itemsize + 5).to(dtype)[1:]
    host.blocks()
    assert host.ranges([x])[0].tolist() == [1, 1, 1]
    assert 1 <= host.blocks() <= WAVE
    generator = torch.Generator().manual_seed(kib)
    step = 512 * 16 // dtype.itemsize  # elements of a block in one step
    drawn = torch.randint(0, len(x), (6,), generator=generator).tolist()
    for place in {0, 1, step - 1, step, 8 * step, len(x) - 1, len(x) - 2, *drawn}:
        if place < len(x):
            x[place] = 3
            assert host.ranges([x])[0].tolist() == [1, 3, 1]
            x[place] = 1


@pytest.mark.parametrize("count", [0, FEW, FEW + 1, MANY + 2])
def test_many_tensors_in_one_launch(host: Host, count: int) -> None:
    """Tensors of every format and many sizes keep their order; beyond the limit of parameters the list is cut."""
    kinds = [(dtype, (size,)) for size in (100, 0, 1) for dtype in FORMATS]
    xs = [random_patterns(*kinds[i % len(kinds)], seed=i) for i in range(count)]
    host.launches()
    rows = host.ranges(xs)
    assert host.launches() == (2 if count > MANY else 1 if count else 0)
    assert rows.shape == (count, 3)
    assert count == 0 or same(rows, reference(xs))


# ---- the recorder's rows ----


def assert_observed(host: Host, xs: list[Tensor]) -> None:
    """The range of each; all columns of what is not finite, or is a mask."""
    for x, (values, examined, _) in zip(xs, host.observe(xs), strict=True):
        expected = [*_reference.health(x).tolist(), float(may_be_mask(x))]
        assert repr(values[:3]) == repr(expected[:3])
        assert examined or (expected[2] != 0 and not may_be_mask(x))
        if examined:
            assert repr(values) == repr(expected)


@dtypes
def test_any_bits_are_counted(host: Host, dtype: torch.dtype) -> None:
    """Counts, the finite part and the first non-finite position, with one block and with several."""
    xs = [fill(dtype, (count,)) for fill in (random_patterns, random_finite) for count in (0, 1, 700, 30_000)]
    if dtype.is_floating_point and dtype.itemsize > 1:
        for where in (0, 8191, 65_535):  # in one block or in another, whichever comes last
            xs.append(random_finite(dtype, (70_000,)))
            xs[-1][where], xs[-1][-1] = INF, float("nan")
    for seed in (0, 1):
        host.shuffle_blocks(seed)
        assert_observed(host, xs)
    host.shuffle_blocks(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masks_are_told_from_what_only_looks_like_one(host: Host, dtype: torch.dtype) -> None:
    """Causal, padded and all-masked rows; a third value, no zero, or +inf makes it none."""
    low = torch.finfo(dtype).min
    xs = []
    for value in (-INF, low):
        causal = torch.full((90, 90), value, dtype=dtype).triu(1)
        padded = torch.zeros(90, 90, dtype=dtype)
        padded[:, 60:] = value
        third = causal.clone()
        third[3, 3] = 1
        xs += [causal, padded, third, torch.full((40,), value, dtype=dtype), -causal]
    assert [may_be_mask(x) for x in xs] == [True, True, False, False, False] * 2
    assert_observed(host, xs)


def test_stamps_and_launches_of_a_frame(host: Host) -> None:
    """A frame is one launch, a larger one takes more, and every row has its own stamp."""
    xs = [torch.full((3,), float(i)) for i in range(FEW + 1)]
    host.launches()
    assert [stamp for *_, stamp in host.observe(xs[:FEW], first=40)] == list(range(40, 40 + FEW))
    assert host.launches() == 1
    rows = host.observe(xs, first=7)
    assert host.launches() == 2
    assert [(values[0], stamp) for values, _, stamp in rows] == [(i, 7 + i) for i in range(FEW + 1)]


# ---- errors ----


def test_a_failed_launch_is_returned_and_cleared(host: Host) -> None:
    """The error of a launch comes back to the caller and is not left for the next check of somebody else's."""
    rows = torch.empty((1, 3), dtype=torch.float64)
    host.library.cuda_host_fail_next(INVALID_VALUE)
    assert host.call_ranges([torch.ones(3)], rows) == INVALID_VALUE
    assert host.library.cuda_host_pending_error() == 0


def test_a_pending_error_of_the_user_is_left_alone(host: Host) -> None:
    """An error that the user's own code left unread is neither reported as ours nor swallowed."""
    host.library.cuda_host_set_pending_error(INVALID_VALUE)
    try:
        assert host.ranges([torch.ones(3)])[0].tolist() == [1, 1, 1]
        assert host.library.cuda_host_pending_error() == INVALID_VALUE
    finally:
        host.library.cuda_host_set_pending_error(0)
