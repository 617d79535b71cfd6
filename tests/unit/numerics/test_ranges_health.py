from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.numerics import ranges
from support.implementations import Implementation
from support.oracle import DTYPES, expected, random_patterns, same
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
