"""Tensors of many blocks of ordinary numbers with a few zeros, nans and others at any place among them.

The native kernels read on in another way from the first block that has a zero; random bits have one in the first.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.implementations import IMPLEMENTATIONS, active, missing
from support.oracle import DTYPES, FORMATS, expected, from_patterns, same

# In one test, as the oracle takes longer than all of them.
HOST = tuple(name for name in IMPLEMENTATIONS if name != "cuda")
BLOCK = 16 << 10  # bytes; kBlockBytes of csrc/cpu/range_loop_impl.h
BYTES = 4 * BLOCK + 200
PLACES = st.sampled_from(
    [block * BLOCK + place for block in range(4) for place in (0, 63, 64, BLOCK - 1)]
) | st.integers(0, BYTES - 1)
STREAM = 256 << 10  # bytes; kStreamBytes there: four at once
STREAMS_BYTES = 5 * STREAM
STREAM_PLACES = st.sampled_from(
    [stream * STREAM + place for stream in range(5) for place in (0, 63, 64, 4095, 4096, STREAM - 1)]
) | st.integers(0, STREAMS_BYTES - 1)


def special_patterns(dtype: torch.dtype) -> list[int]:
    """Zero, the sign bit alone (-0.0, the nan of fnuz or the least integer), all bits, the least, the largest."""
    top = 1 << (8 * dtype.itemsize - 1)
    return [0, top, 2 * top - 1, 1, top | 1, top - 1]


def ordinary(dtype: torch.dtype, count: int, shift: int) -> np.ndarray:
    """Words of numbers between 1 and 2 and of either sign, in no order."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    numbers = np.arange(count, dtype=np.uint64) * np.uint64(7919) + np.uint64(shift)
    form = FORMATS.get(dtype)
    if form is None or form.kind == "e8m0":
        return (numbers % 5 + 2).astype(unsigned)
    fraction, sign = numbers % (1 << form.fraction_bits), numbers % 2 << (form.width - 1)
    return ((form.bias << form.fraction_bits) + fraction + sign).astype(unsigned)


@pytest.mark.parametrize(
    ("num_bytes", "places"),
    [(BYTES, PLACES), pytest.param(STREAMS_BYTES, STREAM_PLACES, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.bool])
@pytest.mark.parametrize(
    "names", [HOST, pytest.param(("cuda",), marks=pytest.mark.cuda)], ids=["host", "cuda"]
)
@given(data=st.data())
@settings(max_examples=25)
def test_specials_among_ordinary_numbers(
    names: tuple[str, ...],
    dtype: torch.dtype,
    num_bytes: int,
    places: st.SearchStrategy[int],
    data: st.DataObject,
) -> None:
    """Range and health are those of the decoded bits, wherever the first zero, nan or infinity stands."""
    shift = data.draw(st.integers(0, 100))
    words = ordinary(dtype, num_bytes // dtype.itemsize, shift)
    placed = st.tuples(places, st.sampled_from(special_patterns(dtype)))
    for place, pattern in data.draw(st.lists(placed, max_size=4)):
        words[place // dtype.itemsize] = pattern
    offset = data.draw(st.integers(0, 3))
    given_words = from_patterns(words, dtype)[offset:]
    want = expected(given_words)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each of two would have too little to read it at several places
    try:
        for name in names:
            if missing(name):
                continue
            with active(name) as implementation:
                x = implementation.place(given_words)
                assert same(implementation.abs_range(x), want[:3]), name
                assert same(implementation.tensor_health(x), want), name
    finally:
        torch.set_num_threads(threads)
