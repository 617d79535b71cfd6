"""Exponent histograms against numpy.frexp of the decoded bits, and against Python's own integers."""

from __future__ import annotations

import functools
import math
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanwatch import ExponentHistogram, exponent_histogram
from nanwatch.numerics import _reference, _spread
from support.allocated import allocated
from support.implementations import Place
from support.oracle import (
    DTYPES,
    FLOATS_8,
    FLOATS_16,
    FORMATS,
    INTEGERS,
    expected,
    from_patterns,
    random_patterns,
    values_of,
)
from support.strategies import views

INF, NAN = math.inf, math.nan
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def histogram_of(x: torch.Tensor) -> ExponentHistogram:
    """The histogram as numpy and Python's integers see it."""
    if x.dtype in FORMATS:
        values = values_of(x).reshape(-1)
        _, exponents = np.frexp(values[np.isfinite(values) & (values != 0)])
        health = expected(x)
        counts = Counter((exponents - 1).tolist())
        return ExponentHistogram(
            x.dtype, counts, health.num_zero, health.num_nan, health.num_posinf, health.num_neginf
        )
    widths = Counter(abs(int(value)).bit_length() - 1 for value in x.reshape(-1).tolist())
    num_zero = widths.pop(-1, 0)
    return ExponentHistogram(x.dtype, widths, num_zero)


def check(place: Place, x: torch.Tensor) -> None:
    got, want = exponent_histogram(place(x)), histogram_of(x)
    assert got == want, f"{x.dtype} {tuple(x.shape)} {x.stride()}"
    assert got.numel == x.numel()
    if x.dtype in FORMATS:
        assert got.num_subnormal == expected(x).num_subnormal


@pytest.mark.parametrize("dtype", [*FLOATS_8, torch.uint8, torch.int8])
def test_every_8_bit_pattern(place: Place, dtype: torch.dtype) -> None:
    """Each of the 256 patterns alone, and all of them together."""
    patterns = np.arange(256, dtype=np.uint8)
    check(place, from_patterns(patterns, dtype))
    for x in from_patterns(patterns, dtype).split(1):
        check(place, x)


@pytest.mark.parametrize("dtype", [*FLOATS_16, torch.uint16, torch.int16])
def test_every_16_bit_pattern(place: Place, dtype: torch.dtype) -> None:
    """All 65536 patterns together, and 1024 runs of 64 consecutive ones, each of which is nearly one exponent."""
    patterns = from_patterns(np.arange(65536).astype(np.uint16), dtype)
    check(place, patterns)
    for x in patterns.split(64):
        check(place, x)


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
    check(place, from_patterns(patterns, dtype))


@pytest.mark.parametrize("dtype", [d for d in INTEGERS if d.itemsize >= 4])
def test_every_width_of_an_integer(place: Place, dtype: torch.dtype) -> None:
    """Both sides of every power of two, and the two ends of the dtype, whose magnitude has no positive twin."""
    info = torch.iinfo(dtype)
    values = {2**width + more for width in range(64) for more in (-1, 0, 1)}
    values |= {-value for value in values} | {info.min, info.max}
    check(place, torch.tensor([v for v in sorted(values) if info.min <= v <= info.max], dtype=dtype))


@given(x=views())
def test_any_tensor(place: Place, x: torch.Tensor) -> None:
    """Any dtype, shape, strides, offset, overlap and alignment gives the counts of the decoded bits."""
    check(place, x)


@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_subnormals_of_wide_formats(place: Place, data: st.DataObject, dtype: torch.dtype) -> None:
    """Tensors of mostly subnormal numbers, which uniform bits hardly ever hold."""
    form = FORMATS[dtype]
    codes = st.integers(0, (1 << form.fraction_bits) + 2).map(
        lambda code: code >> data.draw(st.integers(0, 52))
    )
    drawn = data.draw(st.lists(codes, max_size=60))
    check(place, from_patterns(np.array(drawn, f"u{dtype.itemsize}"), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_chunks(place: Place, dtype: torch.dtype) -> None:
    """Enough elements for several chunks."""
    check(place, random_patterns(dtype, (200_003,)))


@pytest.mark.parametrize("kind", ["zeros", "subnormals", "inf", "nan"])
def test_one_among_many(place: Place, kind: str) -> None:
    """A rare value is found wherever it lies: in the first block, at the edge of one, in the last."""
    value = {"zeros": 0.0, "subnormals": 3e-7, "inf": -INF, "nan": NAN}[kind]
    for at in (0, 2047, 2048, 5000, 9999):
        x = torch.ones(10_000, dtype=torch.float16)
        x[at] = value
        check(place, x)


def test_literal_counts(place: Place) -> None:
    """The written-down histogram of a small tensor with one of everything."""
    x = torch.tensor([0.0, -0.0, 1.0, 1.5, -2.0, 6e-8, 1e-4, INF, -INF, -INF, NAN], dtype=torch.float16)
    got = exponent_histogram(place(x))
    assert got.counts == {-24: 1, -14: 1, 0: 2, 1: 1}
    assert (got.num_zero, got.num_subnormal, got.num_nan, got.num_posinf, got.num_neginf, got.num_inf) == (
        2,
        1,
        1,
        1,
        2,
        3,
    )
    assert (got.numel, got.num_finite_nonzero, got.dtype) == (11, 5, torch.float16)
    assert got.counts[15] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_and_scalar(place: Place, dtype: torch.dtype) -> None:
    """An empty tensor has no counts; a 0-d one has one."""
    assert exponent_histogram(place(torch.empty(0, 3, dtype=dtype))) == ExponentHistogram(dtype, {})
    got = exponent_histogram(place(torch.ones(()).to(dtype)))
    assert got == ExponentHistogram(dtype, {0: 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_subnormals_of_a_thread_that_flushes_them(place: Place, dtype: torch.dtype) -> None:
    """The counts go by the bits, so that subnormals are counted where arithmetic takes them for zero."""
    x = torch.full((100,), torch.finfo(dtype).smallest_normal, dtype=dtype) / 2
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        got = exponent_histogram(place(x))
    finally:
        torch.set_flush_denormal(False)
    assert (got.num_subnormal, got.num_zero) == (100, 0)


def test_expanded_elements_count_each_time(place: Place) -> None:
    """An element seen n times through stride 0 counts n times, 2^40 times too."""
    x = place(torch.tensor([[0.0], [3.0], [NAN]]))
    got = exponent_histogram(x.expand(3, 1000))
    assert got == ExponentHistogram(torch.float32, {1: 1000}, num_zero=1000, num_nan=1000)
    got = exponent_histogram(x.expand(2**38, 3, 4))
    assert got == ExponentHistogram(torch.float32, {1: 2**40}, num_zero=2**40, num_nan=2**40)


def test_a_negative_view_swaps_the_infinities(place: Place) -> None:
    """A lazily negated inf is a negative one."""
    x = torch.tensor([complex(0, INF), complex(0, 1)]).conj().imag
    assert x.is_neg()
    got = exponent_histogram(place(x))
    assert (got.num_posinf, got.num_neginf) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_is_refused_in_words(place: Place, dtype: torch.dtype) -> None:
    """A complex tensor raises a TypeError that says what to pass in its place, and that works."""
    x = torch.tensor([3 + 4j, complex(NAN, 0.5)], dtype=dtype).conj()
    with pytest.raises(TypeError, match=r"view_as_real\(x.resolve_conj\(\)\)"):
        exponent_histogram(place(x))
    with pytest.raises(TypeError, match="view_as_real"):
        _spread.exponent_histogram(place(x))
    got = exponent_histogram(place(torch.view_as_real(x.resolve_conj())))
    assert (got.counts, got.num_nan) == ({1: 1, 2: 1, -1: 1}, 1)


def test_layouts_that_store_less(place: Place) -> None:
    """Elements that a sparse layout does not store are zeros; quantized and nested tensors count by their values."""
    dense = torch.zeros(4, 6)
    dense[0, 5], dense[2, 1], dense[3, 3] = 2.0, -INF, NAN
    want = ExponentHistogram(torch.float32, {1: 1}, num_zero=21, num_nan=1, num_neginf=1)
    for x in (dense.to_sparse(), dense.to_sparse(1), dense.to_sparse_csr(), dense.to_sparse_bsc((2, 2))):
        assert exponent_histogram(place(x)) == want, x.layout


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested() -> None:
    """A quantized tensor counts by its float32 values, a nested one by all its components."""
    quantized = torch.quantize_per_tensor(torch.tensor([0.0, 1.0, 3.0]), 0.5, 0, torch.quint8)
    assert exponent_histogram(quantized) == ExponentHistogram(torch.float32, {0: 1, 1: 1}, num_zero=1)
    components = [torch.ones(2, 3, dtype=torch.float16), torch.full((1, 3), 4.0, dtype=torch.float16)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(components, layout=layout)
        assert exponent_histogram(nested) == ExponentHistogram(torch.float16, {0: 6, 2: 3}), layout


def test_what_has_no_values_is_refused(place: Place) -> None:
    """Meta tensors, and what is no tensor, raise a TypeError."""
    with pytest.raises(TypeError, match=r"exponent_histogram cannot read .* meta tensor"):
        exponent_histogram(torch.ones(3, device="meta"))
    not_a_tensor: Any = [1.0]
    with pytest.raises(TypeError, match=r"takes a torch\.Tensor, got list"):
        exponent_histogram(not_a_tensor)


@pytest.mark.parametrize("read", [_spread.exponent_histogram, _spread.statistics, _reference.abs_range])
def test_the_memory_does_not_grow_with_the_tensor(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """At most 1 MiB for each thread beside 16 MiB of elements, transposed and with gaps too."""
    x = torch.randn(2048, 2048)
    for view in (x, x.T, x[:, ::3]):
        most, _ = allocated(functools.partial(read, view))
        assert most <= torch.get_num_threads() << 20


def test_the_counts_stay_on_the_device(place: Place) -> None:
    """The counts stay on the tensor's device and do not require grad."""
    x = place(torch.ones(3)).requires_grad_()
    for counts in (_spread.exponent_histogram(x), _spread.count_from(x, [1])):
        assert (counts.dtype, counts.device, counts.requires_grad) == (torch.int64, x.device, False)


@given(x=views(), cut=st.integers(0, 10_000))
def test_the_sum_of_two_is_the_histogram_of_both(x: torch.Tensor, cut: int) -> None:
    """Cut anywhere, the parts add up to the whole; the empty histogram changes nothing."""
    flat = x.reshape(-1)
    whole = exponent_histogram(flat)
    assert exponent_histogram(flat[:cut]) + exponent_histogram(flat[cut:]) == whole
    assert whole + ExponentHistogram(x.dtype, {}) == whole


def test_a_histogram_is_a_value() -> None:
    """Equal ones hash alike, it survives pickle, counts of zero are no difference, and it cannot be changed."""
    one, other = (
        ExponentHistogram(torch.float16, counts, 3) for counts in ({1: 2, -3: 4}, {-3: 4, 0: 0, 1: 2})
    )
    assert one == other == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(other)
    assert list(one.counts) == [-3, 1]
    with pytest.raises(AttributeError, match="num_zero"):
        one.num_zero = 4  # type: ignore[misc]


def test_wrong_histograms_are_refused_in_words() -> None:
    """An exponent that the dtype has not, a negative count, and the sum of two dtypes raise ValueError."""
    with pytest.raises(ValueError, match=r"2 elements at exponent 16 of float16; accepted .* -24 to 15"):
        ExponentHistogram(torch.float16, {16: 2})
    with pytest.raises(ValueError, match="-2 elements at exponent 3"):
        ExponentHistogram(torch.float16, {3: -2})
    with pytest.raises(ValueError, match="float16 and bfloat16 have no sum"):
        ExponentHistogram(torch.float16, {}) + ExponentHistogram(torch.bfloat16, {})
