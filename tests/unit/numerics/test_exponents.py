"""`exponent_histogram` against numpy.frexp and Python's integers."""

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

from nanwatch import would_fit
from nanwatch.numerics import _reference
from nanwatch.numerics.fit import ExponentHistogram, exponent_histogram
from support.allocated import allocated
from support.implementations import Place
from support.oracle import FLOATS_8, FLOATS_16, FORMATS, expected, from_patterns, values_of
from support.strategies import views


def histogram_of(x: Tensor) -> ExponentHistogram:
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


def check_histogram(place: Place, x: Tensor) -> None:
    assert exponent_histogram(place(x)) == histogram_of(x), f"{x.dtype} {tuple(x.shape)} {x.stride()}"


@pytest.mark.parametrize("dtype", [*FLOATS_8, *FLOATS_16, torch.int8, torch.uint16])
def test_every_pattern(place: Place, dtype: torch.dtype) -> None:
    """All patterns of 8 and 16 bits together, and in runs of 64, each of which is nearly one exponent."""
    patterns = np.arange(256**dtype.itemsize).astype(f"u{dtype.itemsize}")
    check_histogram(place, from_patterns(patterns, dtype))
    for x in from_patterns(patterns, dtype).split(64)[:: 1 if dtype.itemsize == 1 else 16]:
        check_histogram(place, x)


@given(x=views())
def test_any_tensor(place: Place, x: Tensor) -> None:
    """Any dtype, shape, strides, offset, overlap and alignment gives the counts of the decoded bits."""
    check_histogram(place, x)


def test_layouts() -> None:
    """Elements that a sparse tensor does not store are zero, and each repeat of an expanded one counts."""
    x = torch.tensor([[0.0, 3.0], [0.0, torch.inf]])
    for layout in (x.to_sparse(), x.to_sparse_csr()):
        assert exponent_histogram(layout) == histogram_of(x)
    repeated = torch.tensor([0.0, 3.0]).expand(5, 2)
    assert exponent_histogram(repeated) == histogram_of(repeated)


@pytest.mark.parametrize(
    "read",
    [exponent_histogram, functools.partial(would_fit, dtype=torch.float16), _reference.abs_range],
)
def test_the_memory_does_not_grow_with_the_tensor(read: Callable[[Tensor], object]) -> None:
    """At most 1 MiB for each thread beside 16 MiB of elements, transposed and with gaps too."""
    x = torch.randn(2048, 2048)
    for view in (x, x.T, x[:, ::3]):
        most, _ = allocated(functools.partial(read, view))
        assert most <= torch.get_num_threads() << 20
