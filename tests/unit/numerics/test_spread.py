"""Counts by magnitude words, and the exponents of each format."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.numerics import _spread
from support.implementations import Place
from support.oracle import FLOATS, FORMATS, from_patterns, values_of
from support.strategies import views

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@given(x=views(), data=st.data())
def test_counts_from_a_code(place: Place, x: torch.Tensor, data: st.DataObject) -> None:
    """The elements whose magnitude word reaches a code, by comparing Python's integers."""
    bits = 8 * x.element_size()
    raw = x.contiguous().reshape(-1)
    words = (raw.to(torch.uint8) if x.dtype is torch.bool else raw).view(_WORDS[x.element_size()])
    unsigned = [int(word) % (1 << bits) for word in words.tolist()]
    fnuz = x.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    if x.dtype in FORMATS and x.dtype is not torch.float8_e8m0fnu:
        unsigned = [w if fnuz and w == 0x80 else w % (1 << (bits - 1)) for w in unsigned]
    elif str(x.dtype).startswith("torch.int"):
        unsigned = [min(w, (1 << bits) - w) for w in unsigned]
    near = st.sampled_from(unsigned or [0]).flatmap(lambda w: st.integers(max(w - 1, 0), w + 1))
    codes = data.draw(st.lists(st.one_of(near, st.integers(0, (1 << 64) - 1)), max_size=10))
    codes = [min(code, (1 << 64) - 1) for code in codes]
    signed = [code - (1 << 64) if code >> 63 else code for code in codes]
    got = _spread.count_from(place(x), signed)
    assert got.tolist() == [sum(word >= code for word in unsigned) for code in codes]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_exponents_are_those_of_the_format(dtype: torch.dtype) -> None:
    """From the smallest code above zero to the largest finite number, as frexp has them."""
    code = 0 if dtype is torch.float8_e8m0fnu else 1
    smallest = values_of(from_patterns(np.array([code], f"u{dtype.itemsize}"), dtype))[0]
    exponents = _spread.exponents_of(dtype)
    assert exponents.start == math.frexp(smallest)[1] - 1
    assert exponents.stop == math.frexp(torch.finfo(dtype).max)[1]
