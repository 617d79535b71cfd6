"""The compiled loops of would_fit against plain torch: counts and worst blocks equal, sums to 1e-6."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import nanwatch
from nanwatch.numerics import _extension, block_fit
from nanwatch.numerics.block_fit import BlockFit, block_fits
from nanwatch.numerics.block_formats import BLOCKS_BY_NAME
from support.oracle import from_patterns

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        _extension.C is None or "avx2" not in _extension.C.cpu_capabilities(), reason="no loops with AVX2"
    ),
]
NAMES = [name for name, form in BLOCKS_BY_NAME.items() if form.rows is not None]
FIVE = ["mxfp8", "mxfp4", "nvfp4", "float8_rowwise", "float8_block128x128"]


@pytest.fixture(autouse=True, params=["avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    assert _extension.C is not None
    before = _extension.C.cpu_capability()
    if request.param not in _extension.C.cpu_capabilities():
        pytest.skip(f"this CPU has no {request.param}")
    _extension.C.set_cpu_capability(request.param)
    yield
    _extension.C.set_cpu_capability(before)


def plain(x: torch.Tensor, names: list[str]) -> tuple[BlockFit, ...]:
    """The numbers of plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_fit, "_native", lambda cuts, forms, amax: [None] * len(forms))
        return block_fits(x, [BLOCKS_BY_NAME[name] for name in names], -1)


def is_native(x: torch.Tensor, name: str) -> bool:
    """Whether the loops take the tensor."""
    form = BLOCKS_BY_NAME[name]
    cut = block_fit.matrices_of(x, form, -1, "test")
    return block_fit._native([cut], [form], float(nanwatch.abs_range(x).abs_max))[0] is not None


def check(x: torch.Tensor, names: list[str], *, has_ties: bool = False) -> None:
    """The numbers are those of plain torch. With ties the sums' last bits decide which blocks are the worst."""
    for ours, theirs in zip(nanwatch.would_fit(x, names), plain(x, names), strict=True):
        exact = ("num_elements", "num_saturated", "num_flushed", "num_lost", "num_blocks")
        for field in (*exact, "num_nonfinite", "num_flushed_blocks"):
            assert getattr(ours, field) == getattr(theirs, field), (ours.format, field)
        assert ours.scales == pytest.approx(theirs.scales, rel=0, nan_ok=True), ours.format
        assert ours.signal == pytest.approx(theirs.signal, rel=1e-6), ours.format
        assert ours.noise == pytest.approx(theirs.noise, rel=1e-6), ours.format
        assert [one.sqnr for one in ours.worst] == pytest.approx([one.sqnr for one in theirs.worst], abs=1e-5)
        if not has_ties:
            assert [one.block for one in ours.worst] == [one.block for one in theirs.worst], ours.format
        assert [one.sqnr for one in ours.worst] == pytest.approx([one.sqnr for one in theirs.worst], rel=1e-6)


def rough(*shape: int) -> torch.Tensor:
    """Numbers of many sizes, with zeros, blocks of zeros, numbers on ties and ones that a block flushes."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 13, (*shape[:-1], 1), generator=generator))
    x[..., ::7] *= 2.0**-9
    x[..., 3::11] = (x[..., 3::11] * 8).round() / 8
    x[..., 5::13] = 0.0
    x.view(-1)[40:90] = 0.0
    return x


SHAPES = [(1, 1), (3, 16), (5, 31), (4, 64), (9, 333), (130, 96), (2, 131, 260), (1, 300_000), (40, 9_000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_tails(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows of any length, more rows than a unit of work has, and rows that are shared among threads."""
    x = rough(*shape).to(dtype)
    for name in NAMES:
        if x.abs().max() > 0 and not (shape == (1, 300_000) and name == "float8_rowwise"):
            assert is_native(x, name), name
        check(x, [name])
    check(x, FIVE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_number_of_16_bits(dtype: torch.dtype) -> None:
    """Under the largest of its block, at each distance from it."""
    every = from_patterns(np.arange(1 << 16).astype("u2"), dtype)
    numbers = every[every.isfinite() & (every.abs() < 1e36)]
    blocks = numbers[: len(numbers) // 31 * 31].reshape(-1, 31)
    tops = blocks.float().abs().amax(1, keepdim=True).clamp(min=1e-20)
    for factor in (1.0, 1.5, 1.9, 2.0**6, 2.0**17):
        check(torch.cat([(tops * factor).to(dtype).nan_to_num(0.0, 1.0), blocks], 1), NAMES, has_ties=True)


def test_every_step_of_an_element() -> None:
    """The ties of each element format and their neighbours, with powers of two and other scales around them."""
    for name in NAMES:
        element = BLOCKS_BY_NAME[name].element
        values = torch.tensor([element.value_of(word) for word in range(element.largest_word + 1)])
        ties = (values[1:] + values[:-1]) / 2
        near = torch.cat(
            [values, ties, ties.nextafter(torch.tensor(math.inf)), ties.nextafter(torch.tensor(0.0))]
        )
        for scale in (1.0, 0.3, 2.0**-20, 7.77e3):
            x = torch.cat([near, -near]) * scale
            x = torch.cat([x.repeat(32, 1), torch.full((32, 1), element.ends.largest * scale)], 1)
            check(x.contiguous(), [name], has_ties=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-38, 1e-45])
def test_what_plain_torch_has_to_do(value: float) -> None:
    """A tensor that is not finite, or near an end of float32, gives the same numbers."""
    x = rough(70, 128)
    x[3] = 0.0
    x[3, 64] = value
    check(x, NAMES)
    assert is_native(x, "mxfp8") == (value == 0)
    check(torch.full((4, 64), value), NAMES)


def test_zeros_and_nothing() -> None:
    """All is zero, or there is no element."""
    for shape in [(3, 64), (0, 64), (3, 0)]:
        check(torch.zeros(shape), NAMES)


def test_baseline_leaves_it_to_plain_torch() -> None:
    assert _extension.C is not None
    before = _extension.C.cpu_capability()
    _extension.C.set_cpu_capability("baseline")
    try:
        assert not is_native(torch.ones(4, 64), "mxfp8")
        check(rough(4, 64), FIVE)
    finally:
        _extension.C.set_cpu_capability(before)
