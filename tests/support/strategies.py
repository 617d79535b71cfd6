"""Hypothesis strategies: tensors of any dtype, shape, strides, offset and overlap, made of uniform bits."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from support.oracle import DTYPES, finite_of, random_patterns

dtypes = st.sampled_from(DTYPES)

# Mostly small, with the lengths round the widths of vectors, unrolled bodies and blocks.
lengths = st.one_of(
    st.integers(0, 70),
    st.sampled_from([127, 128, 129, 255, 256, 257, 511, 513, 1023, 1025, 4095, 4097, 16383, 16385]),
)

shapes = st.one_of(
    st.lists(st.integers(0, 9), min_size=0, max_size=5).map(tuple),
    lengths.map(lambda n: (n,)),
    st.tuples(st.integers(1, 7), lengths),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A contiguous tensor, at an offset into its storage or over memory that is aligned to nothing."""
    dtype, shape = draw(dtypes), draw(shapes)
    numel = int(np.prod(shape, dtype=np.int64))
    x = random_patterns(dtype, (numel,), seed=draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        # Finite values too: of random bits a large tensor nearly always has a nan.
        x = finite_of(x)
    place = draw(st.sampled_from(["own", "offset", "misaligned"]))
    if place == "offset":
        before = draw(st.integers(1, 17))
        whole = random_patterns(dtype, (numel + 20,), seed=1)
        if numel:
            whole.view(torch.uint8)[before * dtype.itemsize :][: numel * dtype.itemsize] = x.view(torch.uint8)
        x = whole[before : before + numel]
    elif place == "misaligned" and numel:
        shift = draw(st.integers(1, 15))
        memory = bytearray(shift) + bytearray(x.view(torch.uint8).numpy().tobytes())
        x = torch.frombuffer(memory, dtype=dtype, count=numel, offset=shift)
    return x.reshape(shape)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A tensor seen through up to three of the operations that change its strides."""
    x = draw(tensors())
    for _ in range(draw(st.integers(0, 3))):
        x = draw(_changed(x))
    return x


@st.composite
def _changed(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    change = draw(st.sampled_from(["permute", "narrow", "step", "expand", "unfold", "overlap", "select"]))
    if change == "permute":
        return x.permute(draw(st.permutations(range(x.dim()))))
    if change == "expand":
        return x.unsqueeze(0).expand(draw(st.integers(0, 4)), *x.shape)
    if x.dim() == 0 or x.numel() == 0:
        return x
    if change == "overlap":
        size = draw(st.integers(1, min(x.shape[0], 40)))
        return x.as_strided((x.shape[0] - size + 1, size), (x.stride(0), x.stride(0)), x.storage_offset())
    dim = draw(st.integers(0, x.dim() - 1))
    if change == "select":
        return x.select(dim, draw(st.integers(0, x.shape[dim] - 1)))
    if change == "step":
        index = [slice(None)] * x.dim()
        index[dim] = slice(draw(st.integers(0, x.shape[dim])), None, draw(st.integers(2, 4)))
        return x[tuple(index)]
    if change == "unfold":
        size = draw(st.integers(1, min(x.shape[dim], 5)))
        return x.unfold(dim, size, draw(st.integers(1, 3)))
    start = draw(st.integers(0, x.shape[dim] - 1))
    return x.narrow(dim, start, draw(st.integers(0, x.shape[dim] - start)))
