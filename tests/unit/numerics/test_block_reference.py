"""Conversion to block formats by their published definitions: nearest neighbours among fractions."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from nanwatch.numerics.block_formats import BLOCK_FORMATS, BLOCKS_BY_NAME
from nanwatch.numerics.block_reference import quantized
from support.block_codes import encoded

INF, NAN = math.inf, math.nan
NAMES = tuple(BLOCKS_BY_NAME)
MX = tuple(form.name for form in BLOCK_FORMATS if form.scale == "float8_e8m0fnu")


def magnitudes(name: str) -> list[Fraction]:
    """Every magnitude of the elements, ascending: the place of each is its word."""
    element = BLOCKS_BY_NAME[name].element
    return [Fraction(element.value_of(word)) for word in range(element.largest_word + 1)]


def nearest(value: Fraction, numbers: list[Fraction]) -> Fraction:
    """The nearest number, of two as near the one with an even word; saturates."""
    above = bisect_left(numbers, abs(value))
    if above == len(numbers):
        found = numbers[-1]
    elif above == 0:
        found = numbers[0]
    else:
        below, distance = above - 1, numbers[above] - abs(value)
        other = abs(value) - numbers[below]
        up = distance < other or (distance == other and above % 2 == 0)
        found = numbers[above if up else below]
    return found if value >= 0 else -found


def mx_block(values: list[float], name: str) -> list[float]:
    """A block of finite numbers by OCP MX v1.0, sections 5.2 and 6.3."""
    numbers = magnitudes(name)
    amax = max(abs(Fraction(value)) for value in values)
    if amax == 0:
        return [0.0] * len(values)
    exponent = math.frexp(float(amax))[1] - math.frexp(float(numbers[-1]))[1]
    scale = Fraction(2) ** max(exponent, -127)
    return [float(nearest(Fraction(value) / scale, numbers) * scale) for value in values]


def ties(name: str) -> torch.Tensor:
    """Every element, every middle of two, and their float32 neighbours, in rows of 32 that begin with the largest."""
    numbers = [float(number) for number in magnitudes(name)]
    middles = [(low + high) / 2 for low, high in pairwise(numbers)]
    exact = np.array([*numbers, *middles], np.float32)
    around = np.concatenate([exact, np.nextafter(exact, np.float32(INF)), np.nextafter(exact, np.float32(0))])
    values = torch.from_numpy(np.concatenate([around, -around]))
    top = float(numbers[-1])
    values = values.clamp(-top, top)
    rows = torch.nn.functional.pad(values, (0, -len(values) % 31)).reshape(-1, 31)
    return torch.cat([torch.full((len(rows), 1), top), rows], 1)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("exponent", [0, -100, 90, 1])
def test_mx_rounds_as_the_definition_says(name: str, exponent: int) -> None:
    """Every number of the elements and every tie, at four sizes; the sign of a zero is kept."""
    x = ties(name) * 2.0**exponent
    expected = torch.tensor([mx_block(row, name) for row in x.tolist()])
    got = quantized(x, name)
    assert torch.equal(got, expected)
    assert torch.equal(got.signbit(), x.signbit())


@pytest.mark.parametrize("name", MX)
def test_mx_saturates_above_the_largest_element(name: str) -> None:
    """Between the largest element and the power of two above it, the scale stays and elements saturate."""
    largest = float(magnitudes(name)[-1])
    top = 2.0 ** math.frexp(largest)[1]
    x = torch.linspace(largest, top, 34, dtype=torch.float64)[:-1].float().reshape(1, -1)
    assert quantized(x[:, :32], name).unique().tolist() == [largest]


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_codes_and_scales(name: str) -> None:
    """A reader that multiplies codes and scales in float64 gets these values, but for float32's rounding."""
    form, x = BLOCKS_BY_NAME[name], torch.randn(256, 256) * torch.logspace(-3, 3, 256)[:, None]
    codes, scales, tensor_scale = encoded(x, name)
    numbers = torch.tensor([float(number) for number in magnitudes(name)], dtype=torch.float64)
    sign = 1 << (form.element.bits - 1)
    values = numbers[(codes & (sign - 1)).long()] * torch.where(codes >= sign, -1.0, 1.0)
    each = scales.double() * (1.0 if tensor_scale is None else tensor_scale.double())
    rows, columns = form.rows or 256, form.columns or 256
    each = each.reshape(256 // rows, 256 // columns).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    expected = values / each if form.divides else values * each
    torch.testing.assert_close(quantized(x, name).double(), expected, rtol=2.0**-22, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_at_most_half_a_step_of_a_block(name: str) -> None:
    """Of scales that are no power of two too, whose largest element is the largest number of a block."""
    form, x = BLOCKS_BY_NAME[name], torch.randn(128, 384, dtype=torch.float64).float()
    error = (quantized(x, name) - x).abs().reshape(128, 3, 128).amax((0, 2))
    top = float(magnitudes(name)[-1] - magnitudes(name)[-2]) / float(magnitudes(name)[-1])
    # MX may saturate to the largest element; the scale of NVFP4 is rounded too.
    loss = 0.5 * top if form.scale == "float32" else top + 0.07
    assert (error <= x.abs().max() * loss * 1.01).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (70,), (3, 130), (2, 3, 45), (0, 5), (5, 0), (130, 257)])
def test_a_tail_is_a_block_filled_up_with_zeros(name: str, shape: tuple[int, ...]) -> None:
    """Any shape, and the sizes of codes and scales."""
    x = torch.randn(shape)
    got, (codes, scales, _) = quantized(x, name), encoded(x, name)
    assert got.shape == codes.shape == x.shape
    form = BLOCKS_BY_NAME[name]
    if x.ndim == 2 and form.rows is not None and form.columns is not None:
        padded = torch.zeros(-(-x.shape[0] // 128) * 128, -(-x.shape[1] // 128) * 128)
        padded[: x.shape[0], : x.shape[1]] = x
        assert torch.equal(got, quantized(padded, name)[: x.shape[0], : x.shape[1]])
        assert scales.shape == (-(-x.shape[0] // form.rows), -(-x.shape[1] // form.columns))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_lie_along_the_axis(name: str) -> None:
    """Any axis, and the codes too."""
    x = torch.randn(40, 3, 70)
    assert torch.equal(quantized(x, name, 0), quantized(x.movedim(0, -1), name).movedim(-1, 0))
    assert torch.equal(encoded(x, name, 1).codes, encoded(x.transpose(1, 2), name).codes.transpose(1, 2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_other_dtypes_are_taken_by_their_values(name: str, dtype: torch.dtype) -> None:
    """As float32."""
    x = torch.randn(4, 64).to(dtype)
    assert torch.equal(quantized(x, name), quantized(x.float(), name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-42, 1e-39, 7e-36, 1e-30, 3e38])
def test_zeros_stay_zeros_and_nothing_finite_becomes_nan(name: str, amax: float) -> None:
    """For an all-zero tensor and for tiny and large ones; torchao's NVFP4 makes nan of some."""
    x = torch.tensor([[0.0, amax, -amax / 2, -0.0] * 32])
    got = quantized(x, name)
    assert not got.isnan().any()
    assert (got[:, 0::4] == 0).all()
    assert (got[:, 3::4] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_in_the_mean(name: str) -> None:
    """Numbers that the format has stay what they are. A generator with the same seed gives the same numbers."""
    x = torch.full((128, 512), 1.0)
    x[:, 1::2] = 0.7
    draws = [quantized(x, name, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    low, high = draws[0][:, 1::2].unique().tolist()
    assert low <= 0.7 <= high
    assert draws[0][:, 1::2].mean().item() == pytest.approx(
        0.7, abs=5 * (high - low) / 2 / math.sqrt(128 * 256)
    )
    assert len(draws[0][:, ::2].unique()) == 1


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.arange(4), "tensor of int64"),
        (torch.ones(4, dtype=torch.complex64), "tensor of complex64"),
        (1.0, "float"),
    ],
    ids=["integers", "complex", "number"],
)
def test_what_is_not_floating_point_is_an_error(x: object, words: str) -> None:
    """It names what came and what is accepted."""
    with pytest.raises(TypeError, match=f"quantized got a {words}; accepted are tensors of bfloat16, "):
        quantized(x, "mxfp8")  # type: ignore[arg-type]
