"""`statistics` against numpy's long double, `exponent_histogram` against numpy.frexp and Python's integers."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import nanwatch
from nanwatch.numerics import _reference, distribution
from nanwatch.numerics.distribution import ExponentHistogram, exponent_histogram
from support.allocated import allocated
from support.implementations import Place
from support.oracle import FLOATS_8, FLOATS_16, FORMATS, expected, from_patterns, values_of
from support.strategies import views


def oracle(x: Tensor) -> list[float]:
    """Return mean, rms, kurtosis and share beyond 6 sigma; nan for the kurtosis of equal elements."""
    values = x.to(torch.float64).numpy().astype(np.longdouble).ravel()
    mean = values.mean()
    variance = ((values - mean) ** 2).mean()
    kurtosis = ((values - mean) ** 4).mean() / variance**2 if variance else np.nan
    beyond = (np.abs(values - mean) > 6 * np.sqrt(variance)).mean()
    return [float(one) for one in (mean, np.sqrt((values**2).mean()), kurtosis, beyond)]


def check(x: Tensor) -> None:
    """Compare all four to 1e-6, the mean as a part of the rms."""
    found = nanwatch.statistics(x)
    mean, rms, kurtosis, beyond = oracle(x.cpu())
    assert found.mean == pytest.approx(mean, rel=1e-6, abs=1e-6 * rms)
    assert found[1:] == pytest.approx((rms, kurtosis, beyond), rel=1e-6, nan_ok=True)


def normal(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


# Far more elements than a block has, and no whole number of vectors.
MANY = 50_021
CASES: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(MANY),
    "far from zero": lambda: normal(MANY) + 1000,
    "of few units in the last place": lambda: normal(MANY) * 1e-2 + 1e4,
    "subnormal": lambda: normal(MANY) * 1e-41,
    "huge": lambda: normal(MANY) * 1e37,
    "heavy tails": lambda: normal(MANY) ** 5,
    "two values": lambda: torch.where(normal(MANY) > 0, 0.1, -0.1),
    "equal": lambda: torch.full((MANY,), 0.1),
    "zeros": lambda: torch.zeros(MANY),
    "padded": lambda: torch.cat([torch.zeros(64), 1000 + normal(4032)] * 12),
    "every scale": lambda: torch.cat([normal(5000) * 10.0**k for k in range(-20, 20)]),
    "falling scale": lambda: torch.cat([normal(5000) * 10.0**-k for k in range(-20, 20)]),
    "tiny behind huge": lambda: torch.cat([1e37 + normal(9000) * 1e36, normal(9000) * 1e-37]),
    "tiny doubles behind huge ones": lambda: torch.cat(
        [normal(9000).double() * 1e300 + 1e300, normal(9000) * 1e-30]
    ),
    "double": lambda: normal(MANY).double() * 1e-200,
    "largest double": lambda: normal(MANY).double().clamp(-1, 1) * 1.7e308,
    "one far": lambda: torch.cat([normal(MANY), torch.tensor([60.0])]),
    "one": lambda: torch.tensor([2.5]),
    "rows": lambda: normal(45_000).reshape(5000, 9)[:, :4],
    "columns": lambda: normal(45_000).reshape(90, 500)[:, ::3],
    "transposed": lambda: normal(45_000).reshape(90, 500).T,
    "expanded": lambda: normal(300).reshape(300, 1).expand(300, 7),
    "misaligned": lambda: normal(MANY)[1:],
    "negated": lambda: torch.complex(normal(100), normal(100) + 3).conj().imag,
    "int64": lambda: (normal(MANY).double() * 2**40).long(),
    "bool": lambda: normal(MANY) > 0.5,
    "uint8": lambda: torch.arange(256, dtype=torch.uint8),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_long_doubles(place: Place, case: str) -> None:
    """Whatever scale, mean, tails, strides and dtype."""
    check(place(CASES[case]()))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.int8], ids=str
)
def test_narrow_dtypes(place: Place, dtype: torch.dtype) -> None:
    """Elements are those that the tensor holds, the subnormal ones of half precision among them."""
    check(place((normal(MANY) * 2).to(dtype)))
    if dtype is torch.float16:
        check(place((normal(MANY) * 1e-6).to(dtype)))


def test_halves_in_a_thread_that_flushes_subnormals(place: Place) -> None:
    """A subnormal half is a normal float, so torch's own arithmetic does not take it for zero either."""
    x = place((normal(MANY) * 1e-6).half())
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        check(x)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_finite_or_empty(place: Place, bad: float) -> None:
    """All four are nan, wherever the element is."""
    for at in (0, 100, MANY - 1):
        x = normal(MANY)
        x[at] = bad
        assert all(map(np.isnan, nanwatch.statistics(place(x))))
    assert all(map(np.isnan, nanwatch.statistics(place(torch.empty(0, 3)))))


def test_layouts() -> None:
    """Elements that a sparse tensor does not store are zero; a quantized one has its float32 values."""
    x = torch.where(normal(1000) > 1.5, normal(1000), 0.0).reshape(20, 50)
    for layout in (x.to_sparse(), x.to_sparse_csr()):
        assert nanwatch.statistics(layout) == pytest.approx(tuple(oracle(x)), rel=1e-6)


def histogram_of(x: torch.Tensor) -> ExponentHistogram:
    """The histogram as numpy and Python's integers see it."""
    if x.dtype in FORMATS:
        values = values_of(x).reshape(-1)
        _, powers = np.frexp(values[np.isfinite(values) & (values != 0)])
        health = expected(x)
        counts = dict(Counter((powers - 1).tolist()))
        return ExponentHistogram(
            x.dtype, counts, health.num_zero, health.num_nan, health.num_posinf, health.num_neginf
        )
    widths = Counter(math.frexp(abs(int(value)))[1] - 1 for value in x.reshape(-1).tolist() if value)
    return ExponentHistogram(x.dtype, dict(widths), x.numel() - widths.total())


def check_histogram(place: Place, x: torch.Tensor) -> None:
    assert exponent_histogram(place(x)) == histogram_of(x), f"{x.dtype} {tuple(x.shape)} {x.stride()}"


@pytest.mark.parametrize("dtype", [*FLOATS_8, *FLOATS_16, torch.int8, torch.uint16])
def test_every_pattern(place: Place, dtype: torch.dtype) -> None:
    """All patterns of 8 and 16 bits together, and in runs of 64, each of which is nearly one exponent."""
    patterns = np.arange(256**dtype.itemsize).astype(f"u{dtype.itemsize}")
    check_histogram(place, from_patterns(patterns, dtype))
    for x in from_patterns(patterns, dtype).split(64)[:: 1 if dtype.itemsize == 1 else 16]:
        check_histogram(place, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_exponent_of_a_wide_format(place: Place, dtype: torch.dtype) -> None:
    """The first, the last and a middle number of every power of two, subnormal ones too, with either sign."""
    form = FORMATS[dtype]
    ends = [1 << width for width in range(form.fraction_bits)]
    ends += [field << form.fraction_bits for field in range(1, 1 << form.exponent_bits)]
    sign = 1 << (form.width - 1)
    middle = 1 << (form.fraction_bits - 1)
    codes = [code + more for code in ends for more in (0, -1, 1, middle)]
    patterns = np.array([0, sign, *codes, *(code | sign for code in codes)], f"u{dtype.itemsize}")
    check_histogram(place, from_patterns(patterns, dtype))


@given(x=views())
def test_any_tensor(place: Place, x: torch.Tensor) -> None:
    """Any dtype, shape, strides, offset, overlap and alignment gives the counts of the decoded bits."""
    check_histogram(place, x)


@pytest.mark.parametrize("read", [distribution._counts, distribution._range_and_spread, _reference.abs_range])
def test_the_memory_does_not_grow_with_the_tensor(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """At most 1 MiB for each thread beside 16 MiB of elements, transposed and with gaps too."""
    x = torch.randn(2048, 2048)
    for view in (x, x.T, x[:, ::3]):
        most, _ = allocated(functools.partial(read, view))
        assert most <= torch.get_num_threads() << 20
