"""The compiled loops of would_fit against plain torch: counts and worst blocks equal, sums to 1e-6."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from nanwatch.numerics import _extension
from support.block_fits import FIVE, NAMES, check, every_number, every_step, is_native, rough

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        _extension.C is None or "avx2" not in _extension.C.cpu_capabilities(), reason="no loops with AVX2"
    ),
]


@pytest.fixture(autouse=True, params=["avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    assert _extension.C is not None
    before = _extension.C.cpu_capability()
    if request.param not in _extension.C.cpu_capabilities():
        pytest.skip(f"this CPU has no {request.param}")
    _extension.C.set_cpu_capability(request.param)
    yield
    _extension.C.set_cpu_capability(before)


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
    for factor in (1.0, 1.5, 1.9, 2.0**6, 2.0**17):
        check(every_number(dtype, factor), NAMES, has_ties=True)


def test_every_step_of_an_element() -> None:
    """The ties of each element format and their neighbours, with powers of two and other scales around them."""
    for name in NAMES:
        for scale in (1.0, 0.3, 2.0**-20, 7.77e3):
            check(every_step(name, scale), [name], has_ties=True)


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
