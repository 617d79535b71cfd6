"""would_fit against torch's own casts of every pattern, and against nearest neighbours found with fractions."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanwatch import would_fit
from nanwatch.numerics import _reference
from support.allocated import allocated
from support.implementations import Place
from support.oracle import FLOATS, FLOATS_8, FLOATS_16, from_patterns, values_of

INF, NAN = math.inf, math.nan
TARGETS = tuple(dtype for dtype in FLOATS if dtype is not torch.float8_e8m0fnu)
SMALL = tuple(dtype for dtype in TARGETS if dtype.itemsize <= 2)


def every(dtype: torch.dtype) -> torch.Tensor:
    return from_patterns(np.arange(256**dtype.itemsize).astype(f"u{dtype.itemsize}"), dtype)


def cast_counts(x: torch.Tensor, dtype: torch.dtype, scale: float) -> tuple[int, int, int, int]:
    """(elements, overflow, underflow, subnormal) by casting: products of float32 and a power of two are exact."""
    wide = x.to(torch.float32)
    wide = wide[wide.isfinite() & (wide != 0)]
    assert math.frexp(scale)[0] == 0.5
    product = wide.double() * scale
    assert (product.float().double() == product).all()  # or the cast would round twice
    stored = product.float().to(dtype).double()
    normal = torch.finfo(dtype).smallest_normal
    overflow = ~stored.isfinite()
    if dtype is torch.float8_e4m3fn:  # newer versions of torch saturate: 464 is the tie, and 448 the even one
        overflow |= product.abs() > 464
    zero = stored == 0
    small = (stored.abs() < normal) & ~zero
    return len(wide), int(overflow.sum()), int(zero.sum()), int(small.sum())


@lru_cache
def magnitudes(dtype: torch.dtype) -> list[float]:
    """Every finite magnitude of a small format, ascending, zero first."""
    values = np.abs(values_of(every(dtype)))
    return sorted({*values[np.isfinite(values)].tolist()})


def counts_of(x: Any, dtype: torch.dtype, scale: float = 1.0) -> tuple[int, int, int, int]:
    fit = would_fit(x, dtype, scale=scale)
    return fit.num_elements, fit.num_overflow, fit.num_underflow, fit.num_subnormal


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [*FLOATS_8, *FLOATS_16])
def test_every_pattern_as_torch_casts_it(place: Place, source: torch.dtype, target: torch.dtype) -> None:
    """Each pattern of fp8, fp16 and bf16, scaled by a power of two, counts as what torch's cast makes of it."""
    for power in (0, -3, 7, 20, -20):
        x = every(source)
        if power != 0 and source in (torch.bfloat16, torch.float8_e8m0fnu):
            wide = x.to(torch.float32)
            x = x[(wide.abs() < 2.0**100) & (wide.abs() > 2.0**-100)]  # the product stays an exact float32
        assert counts_of(place(x), target, 2.0**power) == cast_counts(x, target, 2.0**power), power


@pytest.mark.parametrize("target", SMALL)
def test_float32_beside_every_end(place: Place, target: torch.dtype) -> None:
    """The float32 numbers at, next to and halfway between the target's magnitudes count as torch casts them."""
    ladder = magnitudes(target)
    steps = [*ladder, 2 * ladder[-1] - ladder[-2]]
    near = [*steps[:40], *steps[-4:]]
    near += [(a + b) / 2 for a, b in pairwise(near)]
    base = torch.tensor([v for v in near if v < 3.4e38], dtype=torch.float32)
    up, down = (torch.nextafter(base, torch.tensor(end)) for end in (INF, -INF))
    x = torch.cat([base, up, down, -base, -up, -down])
    assert counts_of(place(x), target) == cast_counts(x, target, 1.0)


def test_float64_holds_itself_and_its_ends_move_with_the_scale() -> None:
    """float64's own ends are reached by a scale alone, without a product that would be inf or zero."""
    x = torch.tensor([5e-324, 2.5e-308, 1.0, 1.7e308], dtype=torch.float64)
    assert counts_of(x, torch.float64) == (4, 0, 0, 1)
    assert counts_of(x, torch.float64, 0.5) == (4, 0, 1, 1)
    assert counts_of(x, torch.float64, math.nextafter(0.5, 1)) == (4, 0, 0, 2)
    assert counts_of(x, torch.float64, 2.0) == (4, 1, 0, 1)
    assert counts_of(x, torch.float64, 1e-320) == (4, 0, 2, 1)


def test_shares_leave_out_zeros_and_what_is_not_finite(place: Place) -> None:
    """The shares are of the finite elements that are not zero, over any strides; without one they are 0."""
    x = torch.tensor([[0.0, 1e9, 1.0, INF], [1e-9, 1e-5, NAN, -2.0]])
    fit = would_fit(place(x).t()[:, :], torch.float16)
    assert (fit.overflow, fit.underflow, fit.subnormal, fit.num_elements) == (0.2, 0.2, 0.2, 5)
    assert not fit.fits
    assert str(fit) == "float16: 20.000% overflow, 20.000% become zero, 20.000% become subnormal"
    for nothing in (torch.zeros(3), torch.empty(0), torch.tensor(NAN)):
        fit = would_fit(place(nothing), "float8_e5m2")
        assert (fit.overflow, fit.num_elements, fit.fits) == (0.0, 0, True)


@pytest.mark.parametrize("read", [partial(would_fit, dtype=torch.float16), _reference.abs_range])
def test_the_memory_does_not_grow_with_the_tensor(read: Callable[[Tensor], object]) -> None:
    """At most 1 MiB for each thread beside 16 MiB of elements, transposed and with gaps too."""
    x = torch.randn(2048, 2048)
    for view in (x, x.T, x[:, ::3]):
        most, _ = allocated(partial(read, view))
        assert most <= torch.get_num_threads() << 20
