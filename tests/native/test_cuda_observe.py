"""The kernels behind the recorder's rows, on the host: range, health and what tells a mask, as torch computes them.

The very source that nvcc compiles runs here (see cuda_emulation.py). Races and memory ordering are not tested.
"""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import cuda_emulation
from support.cuda_emulation import DescribedTensor, Host, describe
from support.stand_in_device import Row, Target, values_of
from support.strategies import views

INF = float("inf")
TOO_MANY_DIMS = -1
CAPACITY = 24  # tensors in a launch
CHUNK = 16 << 10  # bytes of a block in small launches


class Observer:
    """nanwatch_cuda_observe with a workspace of its own."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.workspace = torch.zeros(host.library.nanwatch_cuda_workspace(), dtype=torch.uint8)

    def call(self, xs: list[Tensor], target: Target) -> int:
        code: int = self.host.library.nanwatch_cuda_observe(
            (DescribedTensor * max(len(xs), 1))(*map(describe, xs)),
            ctypes.c_int64(len(xs)),
            ctypes.byref(target),
            ctypes.c_void_p(self.workspace.data_ptr()),
            0,
            None,
        )
        return code

    def rows(self, xs: list[Tensor], first: int = 100) -> list[Row]:
        """The rows of one call, whose stamps are checked."""
        rows = (Row * (len(xs) + 1))()
        assert self.call(xs, Target(ctypes.addressof(rows), first)) == 0
        assert [row.stamp for row in rows] == [*range(first, first + len(xs)), 0]
        return list(rows)[:-1]


def assert_rows(host: Host, xs: list[Tensor]) -> None:
    """Each row is what torch makes of the tensor."""
    for x, row in zip(xs, Observer(host).rows(xs), strict=True):
        values, examined = values_of(x)
        count = 12 if examined else 3
        assert bool(row.examined) == examined
        assert repr(list(row.values)[:count]) == repr(values[:count]), x


@given(x=views())
@settings(max_examples=75)
def test_any_view_gives_the_row_that_torch_computes(host: Host, x: Tensor) -> None:
    """Ranges, counts, first index and whether it may be a mask, whatever the strides and bits."""
    if x.dim() <= 5 and not x.is_complex() and x.numel() < 100_000:
        assert_rows(host, [x])


def value_of_low(low: str, dtype: torch.dtype) -> float:
    return -INF if low == "-inf" else torch.finfo(dtype).min


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2]
)
@pytest.mark.parametrize("rows", [1, 17, 1000])
@pytest.mark.parametrize("low", ["-inf", "lowest"])
def test_a_mask_has_a_zero_in_each_row(host: Host, dtype: torch.dtype, rows: int, low: str) -> None:
    """The zero may be anywhere in the row. A row without one makes it no mask, and so does a third value."""
    lowest = value_of_low(low, dtype)
    mask = torch.full((rows, 33), lowest, dtype=torch.float64).to(dtype)
    mask.view(torch.uint8).view(rows, -1)[:, -2 * dtype.itemsize : -dtype.itemsize] = 0  # neither end
    assert (values_of(mask)[0][11] == 1) == (low == "-inf" or dtype.itemsize > 1)
    assert_rows(host, [mask, mask.reshape(-1), mask.t()])
    for bad in {0, rows // 2, rows - 1}:
        spoilt = mask.clone()
        spoilt[bad, -2] = lowest
        assert_rows(host, [spoilt, spoilt[:, None, None].expand(rows, 2, 1, 33)])
    third = mask.clone()
    third[-1, 0] = -1.0
    assert_rows(host, [third])


@given(
    kind=st.sampled_from(["causal", "sliding", "packed", "left", "right", "dense"]),
    low=st.sampled_from(["-inf", "lowest"]),
    length=st.integers(1, 200),
    batch=st.integers(1, 3),
    expand=st.booleans(),
    transpose=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_masks_as_models_make_them(
    kind: str, low: str, length: int, batch: int, expand: bool, transpose: bool, seed: int
) -> None:
    """Causal, sliding, packed, padded on either side; expanded over heads, transposed, in blocks of any order."""
    at = torch.arange(length)
    generator = torch.Generator().manual_seed(seed)
    real = torch.randint(1, length + 1, (batch, 1, 1), generator=generator)
    keep = {
        "causal": at[:, None] >= at,
        "sliding": (at[:, None] >= at) & (at[:, None] - at < 5),
        "packed": (at[:, None] // 7) == (at // 7),
        "left": at.expand(length, length) >= length - real,
        "right": at.expand(length, length) < real,
        "dense": torch.rand(length, length, generator=generator) < 0.5,
    }[kind].expand(batch, length, length)
    mask = torch.zeros(batch, 1, length, length, dtype=torch.float16)
    mask.masked_fill_(~keep[:, None], value_of_low(low, torch.float16))
    if expand:
        mask = mask.expand(batch, 4, length, length)
    if transpose:
        mask = mask.transpose(2, 3)
    host = cuda_emulation.host(900)
    host.shuffle_blocks(seed)
    assert_rows(host, [mask])
    host.shuffle_blocks(0)


def expanded(x: Tensor) -> list[Tensor]:
    """Ways in which a mask (batch, 1, queries, keys) or (batch, 1, 1, keys) is shown to several heads and queries."""
    batch, _, queries, keys = x.shape
    row = x[:, :, :1]
    return [
        x.expand(batch, 3, queries, keys),
        row.expand(batch, 1, 70, keys),
        row.expand(batch, 3, 5, keys),
        x[..., :1].expand(batch, 1, queries, 40),
        x.transpose(2, 3).expand(batch, 2, keys, queries),
    ]


@pytest.mark.parametrize("low", [-INF, -65504.0, float("nan")])
@pytest.mark.parametrize("batch", [1, 2])
def test_repeats_of_an_expanded_mask_are_counted_and_not_read(host: Host, low: float, batch: int) -> None:
    """Counts are of all elements and the first bad one is the first in C order, where stride 0 lies between."""
    generator = torch.Generator().manual_seed(batch)
    mask = torch.where(torch.rand(batch, 1, 90, 130, generator=generator) < 0.3, low, 0.0).to(torch.float16)
    mask[..., 0] = 0.0
    for first in (0, 1, 5):
        mask.view(-1)[:first] = 0.0
        assert_rows(host, [mask, *expanded(mask)])


def shares(*kinds: str, dtype: torch.dtype = torch.float16) -> Tensor:
    """A tensor of one block a kind."""
    count = CHUNK // dtype.itemsize
    normal = torch.linspace(1.0, 2.0, count, dtype=torch.float64)
    low = torch.finfo(dtype).min
    of = {
        "normal": normal,
        "zeros": torch.zeros(count),
        "small": torch.where(torch.arange(count) % 3 == 0, 2.0**-20, normal),
        "relu": torch.where(torch.arange(count) % 2 == 0, 0.0, normal),
        "inf": torch.where(torch.arange(count) == 77, INF, normal),
        "nan": torch.where(torch.arange(count) == count - 1, float("nan"), normal),
        "-inf mask": torch.where(torch.arange(count) % 5 == 0, 0.0, -INF),
        "mask": torch.where(torch.arange(count) % 5 == 0, 0.0, low),
        "masked": torch.full((count,), low),
        "largest": torch.where(torch.arange(count) % 2 == 0, -low, 0.0),
    }
    return torch.cat([of[kind].double() for kind in kinds]).to(dtype)


KINDS = ["normal", "zeros", "small", "relu", "inf", "nan", "-inf mask", "mask", "masked", "largest"]


def test_two_blocks_that_see_different_things_agree(host: Host) -> None:
    """Every pair of them."""
    for pair in itertools.product(KINDS, repeat=2):
        assert_rows(host, [shares(*pair).reshape(8, -1)])


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=5),
    rows=st.sampled_from([1, 2, 8, 64]),
    transpose=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_blocks_that_see_different_things_agree(
    host: Host, kinds: list[str], rows: int, transpose: bool, seed: int
) -> None:
    """Each block decides alone whether to read its share again; together they say what torch says, in any order."""
    host.shuffle_blocks(seed)
    x = shares(*kinds).reshape(rows, -1)
    assert_rows(host, [x.t() if transpose else x])
    host.shuffle_blocks(0)


def test_blocks_of_a_large_tensor_meet(host: Host) -> None:
    """A tensor that many blocks read again has every bad element counted once, in any order of the blocks."""
    x = torch.ones(300_000, dtype=torch.float16).reshape(3, 100_000)
    x[0, 99_999] = INF
    x[1, 5] = -INF
    x[2, 99_999] = float("nan")
    many = torch.zeros(3000, 100)
    many[:, 1:] = -INF
    many[2999, 0] = 1
    for seed in range(3):
        host.shuffle_blocks(seed)
        assert_rows(host, [x, many, x.t(), many[::2]])
    host.shuffle_blocks(0)


def test_a_frame_is_one_launch(host: Host) -> None:
    """Up to 24 tensors, whatever is in them; a larger frame takes more, and rows keep their places."""
    observer = Observer(host)
    host.launches()
    observer.rows([shares("small", "nan"), shares("mask"), torch.ones(64, 64)[:, ::2], *[torch.ones(9)] * 21])
    assert host.launches() == 1
    xs = [torch.tensor([float(i), INF if i % 3 == 0 else 1.0]) for i in range(2 * CAPACITY + 5)]
    rows = observer.rows(xs)
    assert host.launches() == 3
    assert [bool(row.examined) for row in rows] == [i % 3 == 0 for i in range(len(xs))]
    assert [row.values[0] for row in rows] == [
        float(min(i, 1)) if i % 3 else float(i) for i in range(len(xs))
    ]


def test_what_only_the_plain_kernel_reads_has_a_launch_of_its_own(host: Host) -> None:
    """Memory misaligned for its element, and more dimensions than a frame's launch walks: the same rows."""
    bytes_ = torch.zeros(2 * 5000 + 1, dtype=torch.uint8)
    crooked = torch.frombuffer(bytes_.numpy(), dtype=torch.float16, offset=1, count=5000)
    crooked[:] = shares("-inf mask")[:5000]
    deep = torch.as_strided(shares("relu"), (2,) * 6, tuple(3**d for d in range(1, 7)))
    deep[1, 0, 1, 0, 1, 1] = INF
    observer = Observer(host)
    host.launches()
    observer.rows([crooked, deep, torch.ones(3)])
    assert host.launches() == 3
    assert_rows(host, [crooked, deep, torch.ones(3)])


def test_the_workspace_serves_the_next_call(host: Host) -> None:
    """A call after one that met bad tensors counts from nothing."""
    observer = Observer(host)
    bad = torch.full((50_000,), INF)
    for _ in range(2):
        (row,) = observer.rows([bad])
        assert row.values[6] == 50_000
    assert [row.values[2] for row in observer.rows([torch.ones(3), torch.empty(0), torch.tensor(2)])] == [
        1,
        1,
        1,
    ]


def test_what_cannot_be_walked_is_refused_before_anything_is_enqueued(host: Host) -> None:
    """A tensor with too many dimensions among others: a code, no launch and no row."""
    many = torch.as_strided(torch.ones(1 << 14), (2,) * 8, tuple(3**d for d in range(8)))
    rows = (Row * 2)()
    host.launches()
    target = Target(ctypes.addressof(rows), 1)
    assert Observer(host).call([torch.ones(1), many], target) == TOO_MANY_DIMS
    assert host.launches() == 0
    assert [row.stamp for row in rows] == [0, 0]
