from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.numerics import ranges
from support.implementations import Implementation
from support.oracle import DTYPES, FLOATS, FORMATS, expected, from_patterns, random_patterns, same
from support.strategies import views

INF, NAN = math.inf, math.nan


def check(implementation: Implementation, x: torch.Tensor) -> None:
    got, want = implementation.tensor_health(implementation.place(x)), expected(x)
    assert isinstance(got, ranges.TensorHealth)
    assert got._fields == want._fields
    assert same(got, want), f"{got} != {want} for {x.dtype} {tuple(x.shape)} {x.stride()}"


@given(x=views())
def test_any_tensor(implementation: Implementation, x: torch.Tensor) -> None:
    """Any dtype, shape, strides, offset, overlap and alignment gives the counts of the decoded bits."""
    check(implementation, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(implementation: Implementation, dtype: torch.dtype) -> None:
    """Random bits of every dtype, over one and many blocks and threads."""
    for numel in (0, 1, 63, 1000, 16 * 1024, 16 * 1024 + 1, 300_001):
        check(implementation, random_patterns(dtype, (numel,)))


def test_literal_counts(implementation: Implementation) -> None:
    """The written-down counts of a small tensor with one of everything."""
    x = torch.tensor([[0.0, -0.0, 1e-40, 2.0], [-INF, NAN, INF, -1e-45]])
    got = implementation.tensor_health(implementation.place(x))
    assert got.abs_min != got.abs_min
    assert got.abs_max != got.abs_max
    assert got.isfinite is False
    assert got[3:5] == (0.0, 2.0)
    assert got[5:11] == (1, 1, 1, 2, 2, 8)
    assert got.first_nonfinite == (1, 0)


def test_nothing_finite(implementation: Implementation) -> None:
    """Without a finite element the finite ends are the identity of min and max."""
    got = implementation.tensor_health(implementation.place(torch.tensor([INF, NAN])))
    assert (got.finite_abs_min, got.finite_abs_max) == (INF, 0.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_smallest_normal_is_no_subnormal(implementation: Implementation, dtype: torch.dtype) -> None:
    """The boundary is the dtype's own: the smallest normal does not count, what is just below it does."""
    form = FORMATS[dtype]
    if form.kind == "e8m0":
        patterns, want = [0, 1, 2], 0
    else:
        first_normal, sign = 1 << form.fraction_bits, 1 << (form.width - 1)
        patterns, want = [first_normal, first_normal - 1, sign | 1, sign | first_normal, 0, 1], 3
    x = from_patterns(np.array(patterns * 50, f"u{dtype.itemsize}"), dtype)
    assert implementation.tensor_health(implementation.place(x)).num_subnormal == 50 * want


def test_first_nonfinite_follows_the_shape(implementation: Implementation) -> None:
    """The index is in C order of the shape, not in the order of the memory."""
    x = torch.ones(30, 20)
    x[3, 17] = INF
    x[25, 2] = NAN
    check(implementation, x)
    check(implementation, x.t())
    assert implementation.tensor_health(implementation.place(x.t())).first_nonfinite == (2, 25)
    for view in (
        x[::3, ::1],
        x[1:, 1:],
        x.expand(3, 30, 20),
        x.reshape(5, 6, 20).permute(2, 0, 1),
        x.flip(0),
    ):
        check(implementation, view)


def test_zero_dimensional(implementation: Implementation) -> None:
    """The index of a 0-d tensor is the empty tuple, and None when it is finite."""
    assert implementation.tensor_health(implementation.place(torch.tensor(NAN))).first_nonfinite == ()
    assert implementation.tensor_health(implementation.place(torch.tensor(1.0))).first_nonfinite is None


def test_expanded_elements_count_each_time(implementation: Implementation) -> None:
    """An element seen n times through stride 0 counts n times."""
    got = implementation.tensor_health(implementation.place(torch.tensor([[0.0], [NAN]])).expand(2, 1000))
    assert (got.num_zero, got.num_nan, got.numel, got.first_nonfinite) == (1000, 1000, 2000, (1, 0))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.complex64]),
    st.integers(0, 2**16),
)
def test_any_dimension_may_repeat(
    implementation: Implementation, dims: list[tuple[int, bool]], dtype: torch.dtype, seed: int
) -> None:
    """Counts and the first index are those of a copy that has every element, whichever dimensions have stride 0."""
    generator = torch.Generator().manual_seed(seed)
    kept = [1 if repeats else size for size, repeats in dims]
    few = torch.tensor([0.0, 1.0, NAN, INF, -INF])[torch.randint(5, kept, generator=generator)].to(dtype)
    x = few.expand([size for size, _ in dims])
    assert same(implementation.tensor_health(implementation.place(x)), expected(x.clone()))


def test_negative_views_swap_the_infinities(implementation: Implementation) -> None:
    """A lazily negated inf is a negative one."""
    x = torch.tensor([complex(0, INF), complex(0, 1)]).conj().imag
    assert x.is_neg()
    got = implementation.tensor_health(implementation.place(x))
    assert (got.num_posinf, got.num_neginf) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_complex(implementation: Implementation, dtype: torch.dtype) -> None:
    """Complex elements are judged by their modulus; an infinite one counts as positive."""
    x = torch.tensor([3 + 4j, complex(-INF, 0), complex(NAN, 1), complex(INF, NAN), 0, 1e-310], dtype=dtype)
    check(implementation, x)
    got = implementation.tensor_health(implementation.place(x))
    assert (got.num_nan, got.num_posinf, got.num_neginf, got.first_nonfinite) == (1, 2, 0, (1,))


def test_sparse(implementation: Implementation) -> None:
    """Elements that are not stored count as zeros, and the index is over the dense shape."""
    dense = torch.zeros(4, 6)
    dense[0, 5], dense[2, 1], dense[3, 3] = 2.0, -INF, NAN
    for x in (dense.to_sparse(), dense.to_sparse(1), dense.to_sparse_csr(), dense.to_sparse_bsc((2, 2))):
        got = implementation.tensor_health(implementation.place(x))
        assert same(got, expected(dense)), x.layout
