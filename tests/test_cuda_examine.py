"""The kernels behind the recorder's rows, on the host: range, health and what tells a mask, as torch computes them.

The very source that nvcc compiles runs here (see cuda_emulation.py). Races and memory ordering are not tested.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cuda_emulation
from cuda_emulation import DescribedTensor, Host, describe
from stand_in_device import Row, Target, values_of
from strategies import views

INF = float("inf")
TOO_MANY_DIMS = -1
FEW_ROWS = 64  # kFewRows
MANY = 64  # tensors in a launch of the second kernel


@pytest.fixture(params=cuda_emulation.ARCHITECTURES, ids=lambda architecture: f"sm_{architecture // 10}")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """Both paths through the source."""
    found = cuda_emulation.host(request.param)
    yield found
    found.shuffle_blocks(0)


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
        assert self.call(xs, Target(ctypes.addressof(rows), 1, first, None)) == 0
        assert [row.stamp for row in rows] == [*range(first, first + len(xs)), 0]
        return list(rows)[:-1]


def assert_rows(host: Host, xs: list[Tensor]) -> None:
    """Each row is what torch makes of the tensor."""
    for x, row in zip(xs, Observer(host).rows(xs), strict=True):
        values, examined = values_of(x)
        count = 13 if examined else 3
        assert bool(row.examined) == examined
        assert repr(list(row.values)[:count]) == repr(values[:count]), x


@given(x=views(), architecture=st.sampled_from(cuda_emulation.ARCHITECTURES))
@settings(max_examples=150)
def test_any_view_gives_the_row_that_torch_computes(x: Tensor, architecture: int) -> None:
    """Ranges, counts, first index, the lowest number and rows without a zero, whatever the strides and bits."""
    if x.dim() <= 5 and not x.is_complex() and x.numel() < 100_000:
        assert_rows(cuda_emulation.host(architecture), [x])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2]
)
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 1000])
@pytest.mark.parametrize("low", ["-inf", "lowest"])
def test_masks_of_few_and_many_rows(host: Host, dtype: torch.dtype, rows: int, low: str) -> None:
    """The number of rows without a zero is right on both sides of the limit, also where it is in the last column."""
    lowest = -INF if low == "-inf" else torch.finfo(dtype).min
    mask = torch.full((rows, 33), lowest, dtype=torch.float64).to(dtype)
    mask.view(torch.uint8).view(rows, -1)[:, -dtype.itemsize :] = 0
    assert_rows(host, [mask])
    for bad in {0, rows // 2, rows - 1}:
        spoilt = mask.clone()
        spoilt[bad, -1] = lowest
        assert_rows(host, [spoilt])


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


def test_more_tensors_than_a_launch_takes(host: Host) -> None:
    """Rows keep their places over several launches; two launches where one of each is enough."""
    xs = [torch.tensor([float(i), INF if i % 3 == 0 else 1.0]) for i in range(2 * MANY + 5)]
    observer = Observer(host)
    host.launches()
    rows = observer.rows(xs)
    assert host.launches() == 6
    assert [bool(row.examined) for row in rows] == [i % 3 == 0 for i in range(len(xs))]
    assert [row.values[0] for row in rows] == [
        float(min(i, 1)) if i % 3 else float(i) for i in range(len(xs))
    ]
    observer.rows(xs[:16])
    assert host.launches() == 2


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


def test_a_step_counter_chooses_the_row(host: Host) -> None:
    """With a counter in device memory each call writes another of `spacing` rows, stamped with the count."""
    observer = Observer(host)
    rows = (Row * 8)()
    step = ctypes.c_uint64(0)
    target = Target(ctypes.addressof(rows), 4, 0, ctypes.addressof(step))
    for replay in range(1, 7):
        step.value = replay
        assert observer.call([torch.tensor([replay]), torch.tensor([10.0 * replay, INF])], target) == 0
    assert [row.stamp for row in rows] == [4, 5, 6, 3] * 2
    assert [row.values[1] for row in rows[:4]] == [4, 5, 6, 3]
    assert [row.values[3] for row in rows[4:]] == [40, 50, 60, 30]


def test_what_cannot_be_walked_is_refused_before_anything_is_enqueued(host: Host) -> None:
    """A tensor with too many dimensions among others: a code, no launch and no row."""
    many = torch.as_strided(torch.ones(1 << 14), (2,) * 8, tuple(3 * 2**d for d in range(8)))
    rows = (Row * 2)()
    host.launches()
    target = Target(ctypes.addressof(rows), 1, 1, None)
    assert Observer(host).call([torch.ones(1), many], target) == TOO_MANY_DIMS
    assert host.launches() == 0
    assert [row.stamp for row in rows] == [0, 0]
