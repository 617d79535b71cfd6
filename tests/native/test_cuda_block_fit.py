"""The CUDA kernel of would_fit's block formats on the host: the counts of plain torch, and its sums to 1e-6."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanwatch.numerics import _extension, block_fit
from support.block_fits import FIVE, NAMES, check, every_number, every_step, is_native, rough
from support.cuda_emulation import Host, describe

# No line of its source depends on the architecture.
pytestmark = pytest.mark.parametrize("host", [pytest.param(900, id="sm_90")], indirect=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INVALID_VALUE = 1
TOO_MANY_CHUNKS = -2


class Format(ctypes.Structure):
    """BlockFormat of csrc/numerics/block_format.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("scale", "rows", "columns", "bias", "fraction_bits")),
        ("largest", ctypes.c_float),
    )


class Kernel:
    """`_C.block_fit` with host memory where the kernel expects a GPU's."""

    def __init__(self, host: Host, units: int) -> None:
        self.host, self.units = host, units

    def call(
        self, x: torch.Tensor, item: tuple[float, ...], amax: torch.Tensor | None, rows: torch.Tensor
    ) -> int:
        described = describe(x)
        code: int = self.host.library.nanwatch_cuda_block_fit(
            ctypes.byref(described),
            ctypes.byref(Format(*item)),
            ctypes.c_void_p(None if amax is None else amax.data_ptr()),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_int64(self.units),
            0,
            None,
        )
        return code

    def block_fit(
        self, x: torch.Tensor, items: list[tuple[float, ...]], amax: torch.Tensor | None
    ) -> torch.Tensor:
        rows = torch.full((len(items), self.units, block_fit.WIDTH), -7.0, dtype=torch.float64)
        for item, table in zip(items, rows, strict=True):
            assert self.call(x, item, amax, table) == 0
        return rows


@pytest.fixture
def kernel(host: Host, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel in place of the compiled part; three units of work."""
    kernel = Kernel(host, 3)
    stand_in = SimpleNamespace(C=kernel, abs_range=_extension.abs_range, explain_once=lambda: None)
    monkeypatch.setattr(block_fit, "_extension", stand_in)
    return kernel


SHAPES = [(1, 1), (3, 16), (5, 31), (4, 64), (9, 333), (130, 96), (2, 130, 132), (1, 5000)]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(
            dtype, shape, marks=[] if dtype == torch.float32 or shape == (9, 333) else pytest.mark.slow
        )
        for dtype in DTYPES
        for shape in SHAPES
    ],
    ids=str,
)
def test_shapes_and_tails(kernel: Kernel, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Rows of any length, tails shorter than a block, tiles that are cut off at either end, one launch each."""
    x = rough(*shape).to(dtype)
    for name in ("mxfp8", "nvfp4", "float8_rowwise") if x.abs().max() > 0 else ():
        assert is_native(x, name), name
    kernel.host.launches()
    check(x, NAMES)
    assert kernel.host.launches() == len(NAMES)


@settings(max_examples=15)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 150),
    start=st.integers(0, 7),
    units=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
)
def test_any_alignment_and_any_number_of_units(
    host: Host, rows: int, columns: int, start: int, units: int, dtype: torch.dtype
) -> None:
    """No load is wider than its alignment, and units without a block leave an empty row."""
    x = rough(start + rows * columns).to(dtype)[start:].view(rows, columns)
    x[0, 0] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(
            C=Kernel(host, units), abs_range=_extension.abs_range, explain_once=lambda: None
        )
        patch.setattr(block_fit, "_extension", stand_in)
        assert is_native(x, "mxfp8")
        check(x, FIVE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 2.0**6])
def test_every_finite_number_of_16_bits(kernel: Kernel, dtype: torch.dtype, factor: float) -> None:
    """Subnormals too, under the largest of its block."""
    x = every_number(dtype, factor)
    x = x[x.abs().amax(1) < 1e37]
    assert is_native(x, "float8_rowwise")
    check(x, ["mxfp8", "nvfp4", "float8_rowwise"], has_ties=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_an_element(kernel: Kernel, name: str) -> None:
    """The ties of each element format and their neighbours, with powers of two and other scales around them."""
    for scale in (1.0, 0.3, 7.77e3):
        check(every_step(name, scale)[:4], [name], has_ties=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-38, 1e-45, 0.0])
def test_what_is_left_to_plain_torch(kernel: Kernel, value: float) -> None:
    """One number that is not finite, or near an end of float32, refuses the tensor, where the CPU's loops refuse it."""
    x = rough(20, 128)
    x[3] = 0.0
    x[3, 64] = value
    assert is_native(x, "mxfp8") == (value == 0)
    for name in ("nvfp4", "float8_rowwise", "float8_block1x128", "float8_block128x128"):
        assert is_native(x, name) == (abs(value) < 1e37), name
    check(x, FIVE)
    if not math.isfinite(value):
        check(x.to(torch.float16), ["mxfp8", "nvfp4"])


def test_the_first_of_equal_blocks_are_the_worst(kernel: Kernel) -> None:
    """Whichever warp and unit has them, and in whatever order the units run."""
    x = torch.ones(40, 64)
    x[5:, 1] = 1.03
    for seed in (0, 3):
        kernel.host.shuffle_blocks(seed)
        check(x, FIVE)
    kernel.host.shuffle_blocks(0)


def test_errors_are_codes(kernel: Kernel) -> None:
    """A launch that fails leaves nothing pending, and more blocks than are numbered launch nothing."""
    x, rows = torch.ones(1, 1, 32), torch.zeros(3, block_fit.WIDTH, dtype=torch.float64)
    mxfp8 = (0, 1, 32, 7, 3, 448.0)
    kernel.host.library.cuda_host_fail_next(INVALID_VALUE)
    assert kernel.call(x, mxfp8, None, rows) == INVALID_VALUE
    assert kernel.host.library.cuda_host_pending_error() == 0
    kernel.host.launches()
    assert kernel.call(x.expand(1 << 31, 1, 32), mxfp8, None, rows) == TOO_MANY_CHUNKS
    assert kernel.host.launches() == 0
