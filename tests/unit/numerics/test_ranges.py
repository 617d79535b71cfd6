"""Range and health of a tensor by every implementation, against the oracle that decodes its bits."""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.numerics import _reference, ranges
from support.implementations import Implementation, threads
from support.oracle import (
    DTYPES,
    FLOATS,
    expected,
    finite_of,
    from_patterns,
    random_patterns,
    same,
    values_of,
)

INF, NAN = math.inf, math.nan


def check(implementation: Implementation, x: torch.Tensor) -> None:
    """Compare range and health with those of the decoded bits."""
    placed, want = implementation.place(x), expected(x)
    health, got = implementation.tensor_health(placed), implementation.abs_range(placed)
    assert isinstance(got, ranges.AbsRange)
    assert isinstance(health, ranges.TensorHealth)
    what = f"{x.dtype} {tuple(x.shape)} {x.stride()}"
    assert same(got, want[:3]), f"{got} != {want[:3]} for {what}"
    assert same(health, want), f"{health} != {want} for {what}"


# Tensors of any dtype, shape, strides, offset and overlap, made of uniform bits.

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


@given(x=views())
def test_any_tensor(implementation: Implementation, x: torch.Tensor) -> None:
    check(implementation, x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_length(implementation: Implementation, dtype: torch.dtype) -> None:
    """At each length up to 600 the first and the last element are seen and none beyond them."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    shift = 8 * dtype.itemsize - 8
    step = 1 if implementation.is_native else 37
    for length in range(1, 601, step):
        patterns = np.full(length + 2, np.iinfo(unsigned).max, unsigned)  # every format's nan lies outside
        patterns[1 : length + 1] = 0x38 << shift
        patterns[1], patterns[length] = 0x77 << shift, 1
        x = from_patterns(patterns, dtype)[1 : length + 1]
        check(implementation, x)
        patterns[1], patterns[length] = patterns[length], patterns[1]
        check(implementation, x)


@pytest.mark.parametrize(("length", "lines"), [(10_003, 1), (600_003, 1009)])
def test_each_part_of_a_large_tensor_is_read(implementation: Implementation, length: int, lines: int) -> None:
    """An element in each line of one chunk of four streams, and in lines of three chunks and the rest, is seen."""
    x = implementation.place(torch.ones(length))
    for place in {*range(0, length, lines * (16 if implementation.is_native else 128)), length - 1}:
        for value, want in ((3.0, (1.0, 3.0, True)), (0.5, (0.5, 1.0, True))):
            x[place] = value
            assert tuple(implementation.abs_range(x)) == want
        x[place] = 1.0


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.is_floating_point])
def test_integer_ends(implementation: Implementation, dtype: torch.dtype) -> None:
    """The most negative integer has its unsigned magnitude, the largest unsigned ones their value, bool 0 and 1."""
    ends = [0, 1] if dtype is torch.bool else [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    for values in (ends, ends[:1], ends[1:]):
        x = torch.zeros(len(values) * 300, 40, dtype=dtype)
        x[:, 7] = torch.tensor(values * 300, dtype=dtype)
        # Far apart an element is read alone, side by side with others.
        for view in (x[:, 7], x[:, 7].contiguous(), x[: len(values), 7]):
            got = implementation.abs_range(implementation.place(view))
            assert same(got, (float(min(map(abs, values))), float(max(map(abs, values))), True))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.complex32])
def test_complex(implementation: Implementation, dtype: torch.dtype) -> None:
    """Complex elements count by their modulus, also seen through a conjugate or strides."""
    part = {torch.complex128: torch.float64, torch.complex64: torch.float32}.get(dtype, torch.float16)
    finite = torch.view_as_complex(torch.randn(50, 6, 2).to(part))
    cases = [finite, finite.conj(), finite.t(), finite[::3, 1], finite[:0]]
    largest = torch.finfo(part).max
    overflows = [(largest, largest)]  # finite parts whose modulus is not: abs_max is inf, isfinite is True
    for real, imaginary in [(INF, 1.0), (NAN, 1.0), (1.0, -INF), (INF, NAN), *overflows]:
        cases.append(torch.view_as_complex(torch.tensor([[3.0, 4.0], [real, imaginary]], dtype=part)))
    for x in cases:
        check(implementation, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_threads(implementation: Implementation, dtype: torch.dtype) -> None:
    """Round the size from which threads share the work, each place of the ends is found."""
    with threads(2):
        for extra in (-1, 0, 1, 3 * 4096 + 5):
            numel = 512 * 1024 // dtype.itemsize + extra
            x = torch.full((numel,), 2.0).to(dtype)
            for position in (0, numel // 2 - 1, numel // 2, numel - 1):
                for value in (1.0, 90.0, NAN) if dtype.is_floating_point else (1.0, 90.0):
                    x[position] = value
                    want = expected(x[max(position - 1, 0) :][:2])  # the others are 2
                    placed = implementation.place(x)
                    assert same(implementation.abs_range(placed), want[:3])
                    assert same(implementation.tensor_health(placed)[:5], want[:5])
                check(implementation, x)
                x[position] = 2.0


def test_a_thread_that_begins_within_a_row(implementation: Implementation) -> None:
    """With gaps between elements, or between rows and planes of rows, each element is counted once."""
    x, y = torch.full((5, 8, 4003), 9.0)[:, :7, :4000].fill_(1), torch.full((200_000,), 9.0)[::2].fill_(1)
    x[2, 3, 7] = y[7] = 0
    with threads(2):
        check(implementation, x)
        check(implementation, y)


def test_flush_denormal_mode(implementation: Implementation) -> None:
    """Native code sees subnormals as they are, whatever the floating-point mode: it compares bits."""
    if not implementation.is_native:
        pytest.skip("torch's own arithmetic flushes what it is told to flush")
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)
    tensors = [from_patterns(np.array([1, 3] * 100, f"u{dtype.itemsize}"), dtype) for dtype in dtypes]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        read = [(implementation.abs_range(x), implementation.tensor_health(x)) for x in tensors]
    finally:
        torch.set_flush_denormal(False)
    # Compared out of the mode: inside of it a float64 subnormal equals zero.
    for x, (ends, health) in zip(tensors, read, strict=True):
        assert health.abs_min > 0
        assert same(health, expected(x))
        assert same(ends, health[:3])


SPARSE = {
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 3)),
    "bsc": lambda x: x.to_sparse_bsc((2, 3)),
}


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_layouts(implementation: Implementation, dtype: torch.dtype, layout: str) -> None:
    """A sparse tensor has the range of its dense values: zero is in it as soon as one element is not stored."""
    half = torch.tensor([[1, 0, -3, 0, 0, 0], [0, 0, 0, 0, 5, 0]] * 2).to(dtype)
    for dense in (half, torch.zeros_like(half), torch.full_like(half, 7)):
        x = implementation.place(SPARSE[layout](dense))
        assert same(implementation.abs_range(x), expected(dense)[:3])
        assert same(implementation.tensor_health(x), expected(dense))


@pytest.mark.filterwarnings("ignore")
def test_layouts_with_values_behind_an_operation(implementation: Implementation) -> None:
    """Quantized, mkldnn, nested and lazily zero tensors are read by the operation that gives their values."""
    if implementation.device != "cpu":
        pytest.skip("CPU layouts")
    components = [torch.tensor([1.0, 2.0]), torch.tensor([-7.0, INF, 3.0])]
    assert implementation.abs_range(torch.nested.nested_tensor(components)) == (1.0, INF, False)
    jagged = torch.nested.nested_tensor(components, layout=torch.jagged)
    assert implementation.abs_range(jagged) == (1.0, INF, False)
    quantized = torch.quantize_per_tensor(torch.tensor([0.5, -2.0]), 0.5, 0, torch.qint8)
    assert implementation.abs_range(quantized) == (0.5, 2.0, True)
    assert implementation.abs_range(torch._efficientzerotensor(3)) == (0.0, 0.0, True)
    if torch.backends.mkldnn.is_available():
        assert implementation.abs_range(torch.tensor([2.0, -3.0]).to_mkldnn()) == (2.0, 3.0, True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e5m2])
def test_more_than_two_to_the_31_elements(implementation: Implementation, dtype: torch.dtype) -> None:
    """Beyond 2^31 elements the last element is still seen, in real memory."""
    if implementation.name == "reference":
        pytest.skip("it reads chunks of one size, in 20 s")
    numel = 2**31 + 7
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2.5 * numel:
        pytest.skip(f"needs {2.5 * numel / 2**30:.0f} GiB of memory")
    x = implementation.place(torch.ones(numel, dtype=torch.int8).view(torch.uint8).view(dtype))
    one = float(values_of(x[:1])[0])
    assert same(implementation.abs_range(x), (one, one, True))
    x.view(torch.uint8)[-1] = 0
    assert same(implementation.abs_range(x), (0.0, one, True))
    assert implementation.tensor_health(x).num_zero == 1
    if dtype is torch.float8_e5m2:
        x.view(torch.uint8)[-1] = 0x7F
        assert not implementation.abs_range(x).isfinite
        assert implementation.tensor_health(x).first_nonfinite == (numel - 1,)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e5m2, torch.float32, torch.complex64, torch.complex32], ids=str
)
def test_an_expanded_tensor_is_its_few_elements(implementation: Implementation, dtype: torch.dtype) -> None:
    """2^41 elements in the memory of two take the time of two, and all of them are counted."""
    few = implementation.place(torch.tensor([0.0, 3.0]).to(dtype))
    x = few.expand(2**40, 2)
    assert implementation.abs_range(x) == (0.0, 3.0, True)
    assert implementation.abs_ranges([x, few]) == [(0.0, 3.0, True)] * 2
    assert implementation.tensor_health(x).num_zero == 2**40


class Named(torch.Tensor):
    """Tensor of a class of its own."""


def test_several_are_read_as_each_alone(implementation: Implementation) -> None:
    """Tensors of every dtype and of sizes from empty to above a block, other layouts and classes between them."""
    sizes = (0, 1, 33, 5000, 200_000)
    tensors = [random_patterns(dtype, (numel,), seed=numel) for numel in sizes for dtype in DTYPES]
    sparse, named = torch.tensor([[0.0, 4.0]]).to_sparse(), torch.tensor([3.0]).as_subclass(Named)
    for at, x in enumerate((sparse, named, torch.tensor([3 + 4j]))):
        tensors.insert(2 * at, x)
    tensors = [implementation.place(x) for x in tensors]
    together = implementation.abs_ranges(tensors)
    assert together[:5:2] == [(0, 4, True), (3, 3, True), (5, 5, True)]
    assert all(same(got, implementation.abs_range(x)) for got, x in zip(together, tensors, strict=True))


# The reference reads a large tensor in runs of a bounded size, each element once.

X = torch.arange(240_000, dtype=torch.float64)
BOX = X.reshape(4, 20, 30, 100)
VIEWS = {
    "contiguous": X,
    "permuted": BOX.permute(2, 0, 3, 1),
    "transposed columns": X.reshape(400, 600)[:, :500].T,
    "with gaps in each dimension": BOX[:, 1::2, :, ::3].permute(2, 0, 3, 1),
    "rows longer than a run": X.reshape(2, 120_000)[:, ::3],
    "overlapping": X.unfold(0, 1000, 500),
    "a number": X[7],
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_reference_reads_large_tensors_in_runs(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends, and the place in C order of the first bad element, which lies in the last run."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # runs are longer with more threads
    x = VIEWS[view]
    assert _reference.abs_range(x).tolist() == [x.min(), x.max(), 1.0]
    bad = torch.where(x.max() == X, torch.nan, X).as_strided(x.shape, x.stride(), x.storage_offset())
    assert _reference.abs_range(bad)[2] == 0.0
    assert _reference.health(bad)[10] == bad.reshape(-1).isnan().nonzero()[0]
