"""would_fit with a block format, against sums over what `quantized` returns for the whole tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import nanwatch
from nanwatch.numerics import block_fit, block_reference
from nanwatch.numerics.block_fit import BlockFit
from nanwatch.numerics.block_formats import BLOCKS_BY_NAME
from support.oracle import from_patterns

INF, NAN = math.inf, math.nan
NAMES = tuple(BLOCKS_BY_NAME)


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1,000 elements, so that small tensors are cut too."""
    monkeypatch.setattr(block_fit, "_CHUNK", 1000)


def expected(x: torch.Tensor, name: str) -> dict[str, object]:
    """Counts, sums and blocks of a matrix, from the values that it has in the format."""
    form = BLOCKS_BY_NAME[name]
    values = x.float().double()
    stored = block_reference.quantized(x, name).double()
    rows, columns = form.rows or x.shape[0], form.columns or x.shape[1]
    finite = values.isfinite()
    kept = finite & stored.isfinite()
    nonzero = finite & (values != 0)
    flushed = nonzero & (stored == 0)
    signal = torch.where(kept, values, 0.0).square()
    noise = torch.where(kept, (values - stored), 0.0).square()

    def by_block(numbers: torch.Tensor) -> torch.Tensor:
        height, width = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
        padded = torch.zeros(height * rows, width * columns, dtype=torch.float64)
        padded[: x.shape[0], : x.shape[1]] = numbers
        return padded.reshape(height, rows, width, columns).sum((1, 3))

    power, error = by_block(signal), by_block(noise)
    ratios = [
        (float(error[place] / power[place]), place) for place in np.ndindex(*error.shape) if error[place] > 0
    ]
    worst = sorted(ratios, key=lambda pair: (-pair[0], pair[1]))[:5]
    return {
        "num_elements": int(nonzero.sum()),
        "num_flushed": int(flushed.sum()),
        "num_lost": int((nonzero & ~kept).sum()),
        "num_nonfinite": int((~finite).sum()),
        "num_blocks": error.numel(),
        "num_flushed_blocks": int(((by_block(flushed) == by_block(nonzero)) & (by_block(nonzero) > 0)).sum()),
        "signal": float(signal.sum()),
        "noise": float(noise.sum()),
        "worst": [(-10 * math.log10(ratio), place) for ratio, place in worst],
    }


def check(x: torch.Tensor, name: str, fit: BlockFit) -> None:
    """Compare with `expected`: counts exactly, sums to 1e-6."""
    for field, value in expected(x, name).items():
        got = getattr(fit, field)
        if field == "worst":
            assert [error.sqnr for error in got] == pytest.approx(
                [sqnr for sqnr, _ in value], rel=1e-6, abs=1e-5
            )
            if BLOCKS_BY_NAME[name].rows is not None:
                assert {error.block for error in got} <= {place for _, place in value} or len(value) == 5
        else:
            assert got == pytest.approx(value, rel=1e-6 if field in ("signal", "noise") else 0, abs=0), field


def matrices() -> dict[str, torch.Tensor]:
    """Rows of many sizes with tails, zeros, and numbers of one block that are nan or inf."""
    torch.manual_seed(0)
    sizes = torch.randn(76, 419) * torch.logspace(-38, 37, 76)[:, None]
    spread = torch.randn(70, 300) * torch.randn(70, 300).mul(3).exp()
    special = torch.randn(9, 200)
    for row, value in enumerate([0.0, INF, -INF, NAN, 1e-45, 3.4e38]):
        special[row, ::61] = value
    special[6] = 0.0
    special[7, 32:96] = 0.0
    random = from_patterns(
        np.random.default_rng(0).integers(0, 1 << 32, 13 * 515).astype("u4"), torch.float32
    )
    return {"sizes": sizes, "spread": spread, "special": special, "random": random.reshape(13, 515)}


MATRICES = matrices()


@pytest.mark.parametrize("which", MATRICES)
@pytest.mark.parametrize("name", NAMES)
def test_counts_and_sums(name: str, which: str) -> None:
    """Of float32: the counts exactly, the sums to 1e-6, the worst blocks by their SQNR."""
    x = MATRICES[which]
    fit = nanwatch.would_fit(x, name)
    assert isinstance(fit, BlockFit)
    check(x, name, fit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """By their values in float32."""
    for which in ("spread", "special"):
        x = MATRICES[which].to(dtype)
        check(x, name, block_fit.block_fits(x, [BLOCKS_BY_NAME[name]], -1)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "float8_rowwise"])
def test_every_number_of_16_bits(name: str, dtype: torch.dtype) -> None:
    """Subnormals, inf and nan too, next to numbers of their size."""
    x = from_patterns(np.arange(1 << 16).astype("u2"), dtype).reshape(-1, 64)
    check(x, name, block_fit.block_fits(x, [BLOCKS_BY_NAME[name]], -1)[0])


@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4", "float8_tensorwise", "float8_rowwise", "float8_block128x128"]
)
@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_an_axis_and_any_strides(name: str, dim: int) -> None:
    """The numbers are those of a copy with the axis last, and `dim` names the axis."""
    x = torch.randn(6, 50, 40).transpose(1, 2)[:, ::2]
    got = nanwatch.would_fit(x, name, dim=dim)
    there = nanwatch.would_fit(x.movedim(dim, -1).contiguous(), name)
    assert isinstance(got, BlockFit)
    assert isinstance(there, BlockFit)
    assert got.dim == dim % 3
    assert (got.num_flushed, got.worst, got.scales) == (there.num_flushed, there.worst, there.scales)
    assert got.noise == pytest.approx(there.noise, rel=1e-6)


def test_the_worst_blocks_are_named() -> None:
    """By their place in the tensor counted in blocks, the worst first."""
    x = torch.ones(3, 4, 96)
    x[1, 2, 40] = 1e6  # everything else in this block becomes zero
    x[2, 0, 5] = 1.03
    fit = nanwatch.would_fit(x, "mxfp4")
    assert isinstance(fit, BlockFit)
    assert [error.block for error in fit.worst] == [(1, 2, 1), (2, 0, 0)]
    assert fit.num_flushed == 31
    x[0, 3, 64:] = 0.0
    x[0, 3, 64:66] = torch.tensor([1.0, 1e-3])
    assert nanwatch.would_fit(x, "mxfp4").num_flushed == 32


def test_scales_are_those_of_blocks_with_numbers() -> None:
    """Zeros, nan and inf have no scale that says something."""
    x = torch.zeros(4, 32)
    x[0], x[1], x[2, 3] = 2.0**8, 2.0**-3, INF
    fit = nanwatch.would_fit(x, "mxfp8")
    assert fit.scales == (2.0**-11, 1.0)
    assert fit.scale_spread == 11.0
    assert fit.sqnr == INF


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4), (), (1,)])
def test_nothing_to_measure(name: str, shape: tuple[int, ...]) -> None:
    """No element, or one alone."""
    fit = nanwatch.would_fit(torch.ones(shape), name)
    assert isinstance(fit, BlockFit)
    assert fit.num_elements == math.prod(shape)
    assert (fit.saturated, fit.flushed, fit.worst) == (0.0, 0.0, ())
    assert math.isnan(fit.sqnr) == (fit.num_elements == 0)


def test_what_saturates_rounds_beyond_the_largest_element() -> None:
    """464 is the tie of float8_e4m3fn, and 448 the even one."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([448.0, 464.0, math.nextafter(464.0, INF), 500.0])
    x[0, 2] = torch.tensor(464.0).nextafter(torch.tensor(INF))
    fit = nanwatch.would_fit(x, "mxfp8")
    assert fit.num_saturated == 2
    assert fit.saturated == 0.5


def test_bad_input_is_an_error_that_says_what_is_accepted() -> None:
    """An unknown format, integers, complex numbers, a histogram, a scale."""
    x = torch.ones(4)
    with pytest.raises(TypeError, match=r"mxfp9, which is no floating-point format; accepted are .*mxfp8"):
        nanwatch.would_fit(x, "mxfp9")
    with pytest.raises(TypeError, match="would_fit got a tensor of int64; accepted are tensors of bfloat16"):
        nanwatch.would_fit(torch.arange(4), "mxfp8")
    with pytest.raises(TypeError, match="would_fit got a tensor of complex64"):
        nanwatch.would_fit(x.to(torch.complex64), "nvfp4")
    with pytest.raises(TypeError, match=r"torch\.sparse_coo for mxfp8; pass a dense tensor"):
        nanwatch.would_fit(x.to_sparse(), "mxfp8")
    with pytest.raises(TypeError, match="got a histogram for mxfp8"):
        nanwatch.would_fit(nanwatch.exponent_histogram(x), "mxfp8")
    with pytest.raises(ValueError, match=r"scale=2.0 for mxfp8, whose blocks have their own"):
        nanwatch.would_fit(x, "mxfp8", scale=2.0)
    with pytest.raises(TypeError, match=r"takes a torch\.Tensor, got list"):
        nanwatch.would_fit([1.0], "mxfp8")  # type: ignore[call-overload]
    with pytest.raises(IndexError, match="Dimension out of range"):
        nanwatch.would_fit(x, "mxfp8", dim=1)
    with pytest.raises(TypeError, match=r"dim=1.0; the number of an axis is accepted"):
        nanwatch.would_fit(x, "mxfp8", dim=1.0)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="dim=0 for float16, which has no blocks: leave it out"):
        nanwatch.would_fit(x, "float16", dim=0)
    with pytest.raises(TypeError, match=r"would_fit got dtype MXFP8.*; close names: mxfp8"):
        nanwatch.would_fit(x, "MXFP8")
    with pytest.raises(ValueError, match=r"got the format 'NVFP4'; accepted are .*; close names: nvfp4"):
        nanwatch.would_fit(x, ("mxfp8", "NVFP4"))


def test_several_formats() -> None:
    """A list and a tuple give the same."""
    x = torch.linspace(-1, 1, 64)
    expected = (nanwatch.would_fit(x, "mxfp8"), nanwatch.would_fit(x, "nvfp4"))
    assert nanwatch.would_fit(x, ["mxfp8", "nvfp4"]) == expected == nanwatch.would_fit(x, ("mxfp8", "nvfp4"))


def test_words() -> None:
    """One line for a table."""
    assert str(nanwatch.would_fit(torch.tensor([1.0, NAN, 2.0]), "float8_rowwise")) == (
        "float8_rowwise: SQNR nan dB, 0.000% saturate, 0.000% become zero, 0.000% of 1 blocks become zero, "
        "2 become nan or inf, 1 were nan or inf before"
    )
    large = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert str(nanwatch.would_fit(large, "mxfp8")).endswith("1 were nan or inf before")
