"""The CUDA kernel on the host, over strided tensors: rows, vectors, elements and the plain way, each and mixed."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

from nanwatch.numerics import _reference
from support import oracle, strategies
from support.cuda_emulation import FORMATS, DescribedTensor, Host, describe, same
from support.cuda_tensors import assert_matches, random_bits, random_finite

TOO_MANY_DIMS = -1


def _strided_views(fill: Callable[..., torch.Tensor] = random_bits) -> dict[str, torch.Tensor]:
    x = fill(torch.float32, 6 * 7 * 8 * 9, seed=3).view(6, 7, 8, 9)
    return {
        "transposed": x.flatten(1).t(),
        "permuted": x.permute(2, 0, 3, 1),
        "columns": x.flatten(1)[:, :5],
        "steps": x[::2, ::3, :, ::2],
        "expanded inside": x[:, :1].expand(6, 7, 8, 9),
        "expanded outside": x[0].expand(5, 7, 8, 9),
        "expanded scalar": torch.tensor(float("nan")).expand(3, 4),
        "overlapping": torch.as_strided(x, (50, 20), (3, 1)),
        "0-d": x[1, 2, 3, 4],
        "offset": x.flatten()[1:].view(-1)[3:1000],
        "empty strided": x[:, :0].permute(1, 0, 2, 3),
        "size one with odd stride": torch.as_strided(x, (1, 10, 1), (7, 2, 1000)),
        "many dims": x.flatten()[: 1 << 11].view((2,) * 11).permute(*range(10, -1, -1)),
    }


@pytest.mark.parametrize("name", _strided_views())
def test_strides(host: Host, name: str) -> None:
    """Strided, expanded and overlapping views give what their contiguous copy gives, position included."""
    assert_matches(host, _strided_views(random_bits)[name])
    assert_matches(host, _strided_views(random_finite)[name])


def test_first_nonfinite_in_a_permuted_tensor(host: Host) -> None:
    """The position is counted in the tensor's own order, not in memory's."""
    for element in range(24):
        x = torch.ones(4, 3, 2).permute(2, 0, 1)
        index = torch.unravel_index(torch.tensor(element), x.shape)
        x[index] = float("-inf")
        x[-1, -1, -1] = float("nan")
        row = host.health(x)
        assert row[10] == element
        assert row[5:8].tolist() == [1, 0, int(element != 23)]


def test_repeated_elements_are_counted_as_often_as_they_stand(host: Host) -> None:
    """An expanded dimension is read once and multiplies every count."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, 0.0, 1e-45, inf, nan, -inf, -inf]).view(7, 1)
    for view, first in ((x.expand(7, 5), 15), (x.t().expand(5, 7), 3)):
        row = host.health(view)
        assert row[:3].isnan().tolist() == [True, True, False]
        assert row[2:].tolist() == [0, 0, 1, 5, 5, 10, 5, 5, first]


def _zero_the_ends(view: torch.Tensor) -> int:
    """Sets the corners of every dimension to zero and the rest to one; how many zeros that are."""
    view.fill_(1)
    for dim in range(view.dim()):
        view.select(dim, 0).fill_(0)
        view.select(dim, -1).fill_(0)
    return int((view.float() == 0).sum())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("row_bytes", [24, 32, 496, 512, 1040, 4096, 8176, 8192, 20_000, 70_000])
@pytest.mark.parametrize("start", [0, 1])
def test_rows(host: Host, dtype: torch.dtype, row_bytes: int, start: int) -> None:
    """Rows of any length, on and off 16-byte boundaries, longer and shorter than a chunk: each element counts once."""
    columns = row_bytes // dtype.itemsize
    wide = -(-(columns + 9) // 16) * 16
    x = torch.zeros(3 + 70_000 // row_bytes, wide, dtype=dtype)[:, start : start + columns]
    zeros = _zero_the_ends(x)
    assert host.health(x)[8] == zeros
    x.fill_(2)
    for row, column, value in ((0, 0, 1), (-1, -1, 5), (1, columns // 2, 7)):
        x[row, column] = value
    assert host.ranges([x])[0].tolist() == [1, 7, 1]
    x[-1, -1], x[1, columns // 2], x[0, 0] = 9, 1, 2
    assert host.ranges([x])[0].tolist() == [1, 9, 1]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :, 1:3, :, :],  # vectors, four dimensions
        lambda x: x[:, 1:, 1:3, ::2, 8:24],
        lambda x: x[:, ::2, :, 1:, 1:20].transpose(1, 3),  # elements of a row that is no vector
        lambda x: x[::2, ::2, ::2, ::2, ::2],  # more dimensions than share a launch
        lambda x: x[1:, :, :1, :, :].expand(-1, -1, 4, -1, -1),
    ],
    ids=["vectors", "stepped vectors", "short rows", "plain", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16, torch.int32, torch.float64])
def test_every_way_of_reading(
    host: Host, dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Vectors, elements and the plain way over several dimensions give what the contiguous copy gives."""
    for fill in (random_bits, random_finite):
        assert_matches(host, view(fill(dtype, 4 * 6 * 4 * 6 * 32, seed=2).view(4, 6, 4, 6, 32)))


def test_strided_tensors_share_the_launch(host: Host) -> None:
    """A frame of flat and strided tensors is one launch; only what the plain kernel must read is a second."""
    x = random_finite(torch.bfloat16, 4 * 6 * 4 * 6 * 32).view(4, 6, 4, 6, 32)
    frame = [x, x.permute(2, 0, 4, 3, 1), x.flatten(1)[:, 1:], x[:, :, 1:3], x.flatten()[::2]]
    host.launches()
    rows = host.ranges(frame)
    assert host.launches() == 1
    assert same(rows, torch.stack([_reference.abs_range(each) for each in frame]))
    frame.insert(1, x[::2, ::2, ::2, ::2, ::2])
    rows = host.ranges(frame)
    assert host.launches() == 2
    assert same(rows, torch.stack([_reference.abs_range(each) for each in frame]))


@pytest.mark.parametrize(("count", "launches"), [(8, 2), (70, 3)])
def test_more_strided_tensors_than_fit_one_launch(host: Host, count: int, launches: int) -> None:
    """When the places for strides are used up the list is cut, and flat tensors still fit in."""
    xs = [
        each
        for k in range(count)
        for each in (torch.full((5, 6), k + 1.0)[:, ::2], torch.full((3,), -k - 1.0))
    ]
    host.launches()
    rows = host.ranges(xs)
    assert host.launches() == launches
    assert rows[:, 1].tolist() == [float(k + 1) for k in range(count) for _ in range(2)]


def test_blocks_of_a_strided_tensor_may_come_in_any_order(host: Host) -> None:
    """A strided tensor's blocks meet as a flat one's do, in the plain kernel too."""
    x = random_finite(torch.float32, 1 << 17).view(-1, 4)[:, :3]
    spread = random_finite(torch.float32, 3**9).view((3,) * 9)[(slice(None, None, 2),) * 9]
    for seed in (1, 2, 3):
        host.shuffle_blocks(seed)
        assert_matches(host, x)
        assert_matches(host, spread)
    host.shuffle_blocks(0)


def test_memory_misaligned_for_its_own_element_and_strided(host: Host) -> None:
    """An odd address goes the plain way, strides and all."""
    x = random_finite(torch.float32, 60).view(6, 10)
    moved = torch.zeros(241, dtype=torch.uint8)
    moved[1:] = x.view(torch.uint8).flatten()
    described = describe(x[:, ::3], moved.data_ptr() + 1)
    rows = torch.empty((1, 3), dtype=torch.float64)
    assert host.call_ranges([described], rows) == 0
    assert same(rows[0], _reference.abs_range(x[:, ::3]))


@pytest.mark.parametrize(
    ("sizes", "strides", "fast"),
    [
        ((3, 5, 7), (100, 14, 2), True),
        ((1 << 20, 1 << 11), (1 << 12, 2), False),  # 2^31 elements
        ((3 << 30, 3, 5), (60, 15, 2), False),  # a size beyond 32 bits
        ((5, 3 << 33), (1 << 37, 2), False),
        ((1 << 20, 1 << 16), (1 << 17, 1), True),  # 2^36 elements, in rows
        ((1 << 32, 1 << 10), (1 << 11, 1), False),  # more rows than 32 bits number
    ],
)
def test_places_beyond_32_bits(
    host: Host, sizes: tuple[int, ...], strides: tuple[int, ...], fast: bool
) -> None:
    """Bytes and positions are 64-bit, and what 32-bit numbers do not reach is left to the plain kernel."""
    longs = ctypes.c_int64 * len(sizes)
    # The data is never read: a stand-in address on a 16-byte boundary.
    tensor = DescribedTensor(0, longs(*sizes), longs(*strides), len(sizes), FORMATS[torch.float32])
    numel = math.prod(sizes)
    generator = random.Random(0)
    # All have their dimensions in the order of memory, so the walk is the C order and its number is the position.
    for number in [0, 1, numel - 1, *(generator.randrange(numel) for _ in range(100))]:
        rest, offset = number, 0
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            offset += rest % size * stride * 4
            rest //= size
        got = ctypes.c_int64(), ctypes.c_int64()
        found = host.library.cuda_host_walk(
            ctypes.byref(tensor), ctypes.c_int64(number), ctypes.byref(got[0]), ctypes.byref(got[1])
        )
        assert (found, got[0].value, got[1].value) == (int(fast), offset, number)


@settings(max_examples=200)
@given(x=strategies.views())
def test_any_view(host: Host, x: torch.Tensor) -> None:
    """Any shape, strides, offset and overlap: range and health equal the arithmetic of the format's definition."""
    want = oracle.expected(x)
    assert oracle.same(
        tuple(host.ranges([x])[0].tolist()), (want.abs_min, want.abs_max, float(want.isfinite))
    )
    row = host.health(x).tolist()
    assert oracle.same(tuple(row[3:10]), tuple(float(value) for value in want[3:10]))
    first = -1 if want.first_nonfinite is None else _flat(want.first_nonfinite, x.shape)
    assert row[10] == first


def _flat(index: tuple[int, ...], shape: torch.Size) -> int:
    number = 0
    for i, size in zip(index, shape, strict=True):
        number = number * size + i
    return number


def test_more_dimensions_than_are_walked(host: Host) -> None:
    """A tensor that does not collapse to 25 dimensions is refused with a code, not read wrongly."""
    longs = ctypes.c_int64 * 26
    spread = DescribedTensor(
        0, longs(*[2] * 26), longs(*(3**k for k in range(26))), 26, FORMATS[torch.float32]
    )
    rows = torch.empty((1, 3), dtype=torch.float64)
    assert host.call_ranges([spread], rows) == TOO_MANY_DIMS
    assert b"dimensions" in host.library.nanwatch_cuda_error(TOO_MANY_DIMS)
    mergeable = torch.ones((1, 1, 1, 2) * 15)
    assert host.ranges([mergeable])[0].tolist() == [1, 1, 1]
