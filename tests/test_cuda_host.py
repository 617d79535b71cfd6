"""The CUDA kernels' arithmetic on the host: csrc/range_cuda.cu compiled with g++ against a stand-in for CUDA.

The very source that nvcc compiles runs here, one fibre per CUDA thread (tests/cuda_host/cuda_runtime.h), so heads,
bodies, tails, chunk maps and strided walks are checked without a GPU. Races and memory ordering are not.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanwatch import _reference

ROOT = Path(__file__).resolve().parent.parent
CHUNK_BYTES = 64 << 10  # kChunkBytes
MAX_BATCH = 1024  # kMaxBatch
TOO_MANY_DIMS = -1
INVALID_VALUE = 1

# The numbers of csrc/formats.h.
FORMATS = {
    torch.float64: 0,
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.float8_e4m3fnuz: 6,
    torch.float8_e5m2fnuz: 7,
    torch.float8_e8m0fnu: 8,
    torch.bool: 9,
    torch.uint8: 10,
    torch.int8: 11,
    torch.uint16: 12,
    torch.int16: 13,
    torch.uint32: 14,
    torch.int32: 15,
    torch.uint64: 16,
    torch.int64: 17,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

dtypes = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("dims", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


def _describe(x: torch.Tensor, address: int | None = None) -> _Tensor:
    longs = ctypes.c_int64 * max(x.dim(), 1)
    data = x.data_ptr() if address is None else address
    return _Tensor(data, longs(*x.shape), longs(*x.stride()), x.dim(), FORMATS[x.dtype])


class Host:
    """range_cuda.h through ctypes, with host memory where the kernels expect a GPU's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.nanwatch_cuda_error.restype = ctypes.c_char_p
        library.cuda_host_launches.restype = ctypes.c_int64
        for name in ("nanwatch_cuda_ranges_workspace", "nanwatch_cuda_health_workspace"):
            getattr(library, name).restype = ctypes.c_size_t

    def call_ranges(self, described: list[_Tensor], rows: torch.Tensor) -> int:
        count = ctypes.c_int64(len(described))
        size = self.library.nanwatch_cuda_ranges_workspace(count)
        workspace = torch.full((size,), 0xA5, dtype=torch.uint8)  # what an allocator hands out is not zeroed
        array = (_Tensor * max(len(described), 1))(*described)
        return self.library.nanwatch_cuda_ranges(
            array, count, ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(workspace.data_ptr()), 0, None
        )

    def ranges(self, xs: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.full((len(xs), 3), -7.0, dtype=torch.float64)
        assert self.call_ranges([_describe(x) for x in xs], rows) == 0
        return rows

    def health(self, x: torch.Tensor) -> torch.Tensor:
        row = torch.full((11,), -7.0, dtype=torch.float64)
        workspace = torch.full((self.library.nanwatch_cuda_health_workspace(),), 0xA5, dtype=torch.uint8)
        described = _describe(x)
        error = self.library.nanwatch_cuda_health(
            ctypes.byref(described),
            ctypes.c_void_p(row.data_ptr()),
            ctypes.c_void_p(workspace.data_ptr()),
            0,
            None,
        )
        assert error == 0
        return row

    def launches(self) -> int:
        """Kernel launches since the last call of this."""
        return self.library.cuda_host_launches()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ was not found: the CUDA source cannot be compiled for the host")
    library = tmp_path_factory.mktemp("cuda_host") / "cuda_host.so"
    # A misaligned load is a fault on a GPU and nothing on x86: the sanitizer makes it an error here too.
    flags = [
        "-std=c++17",
        "-O2",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-shared",
        "-fPIC",
    ]
    flags += ["-fsanitize=alignment,shift", "-fno-sanitize-recover=all", "-static-libubsan"]
    sources = [f"-I{ROOT / 'tests/cuda_host'}", f"-I{ROOT / 'csrc'}", str(ROOT / "tests/cuda_host/host.cpp")]
    done = subprocess.run([compiler, *flags, *sources, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Host(ctypes.CDLL(str(library)))


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal element for element, a nan equal to a nan."""
    return torch.equal(got.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)) and torch.equal(
        got.isnan(), expected.isnan()
    )


def random_bits(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """`count` elements of any bits at all: nan, inf, zeros and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    words = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return words.view(dtype)


def random_finite(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """The same with the non-finite elements replaced by one that is finite."""
    x = random_bits(dtype, count, seed)
    if not dtype.is_floating_point:
        return x
    bits = x.view(BITS[dtype.itemsize])
    one = torch.ones((), dtype=torch.float32).to(dtype).view(bits.dtype)
    return torch.where(torch.isfinite(x.double()), bits, one).view(dtype)


def assert_matches(host: Host, x: torch.Tensor) -> None:
    assert same(host.ranges([x])[0], _reference.abs_range(x)), "range"
    assert same(host.health(x), _reference.health(x)), "health"


@dtypes
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 33, 255, 4097])
def test_sizes_around_a_vector_and_a_block(host: Host, dtype: torch.dtype, count: int) -> None:
    """A run of any length gives the reference's row, whatever its bits."""
    assert_matches(host, random_bits(dtype, count))
    assert_matches(host, random_finite(dtype, count))


@dtypes
def test_every_alignment(host: Host, dtype: torch.dtype) -> None:
    """A run may start at any element of a 16-byte vector."""
    x = random_finite(dtype, 80)
    for start in range(16 // dtype.itemsize + 1):
        assert_matches(host, x[start:-3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_memory_misaligned_for_its_own_element(host: Host, dtype: torch.dtype) -> None:
    """Memory from another library may start at an odd address; no load may be wider than its alignment."""
    x = random_finite(dtype, 100)
    moved = torch.zeros(100 * dtype.itemsize + 1, dtype=torch.uint8)
    moved[1:] = x.view(torch.uint8)
    rows = torch.empty((1, 3), dtype=torch.float64)
    assert host.call_ranges([_describe(x, moved.data_ptr() + 1)], rows) == 0
    assert same(rows[0], _reference.abs_range(x))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_chunks_cover_a_large_run(host: Host, dtype: torch.dtype, extra: int) -> None:
    """The first and last element of every chunk are read exactly once, also when the last chunk is ragged."""
    per_chunk = CHUNK_BYTES // dtype.itemsize
    x = torch.ones(3 * per_chunk + extra).to(dtype)
    edges = [0, per_chunk - 1, per_chunk, 2 * per_chunk - 1, 2 * per_chunk, len(x) - 1]
    x[edges] = 0
    assert host.health(x)[8] == len(edges)
    for edge in edges:
        x.fill_(1)
        x[edge] = 3
        assert host.ranges([x])[0].tolist() == [1, 3, 1]


@pytest.mark.parametrize("dtype", [d for d in FORMATS if d.itemsize == 1 and d != torch.bool])
def test_every_8_bit_pattern_alone(host: Host, dtype: torch.dtype) -> None:
    """Each of the 256 patterns as a tensor of its own gives the reference's row."""
    xs = list(torch.arange(256, dtype=torch.uint8).view(dtype).split(1))
    assert same(host.ranges(xs), torch.stack([_reference.abs_range(x) for x in xs]))


@pytest.mark.parametrize("dtype", [d for d in FORMATS if d.itemsize == 2])
def test_every_16_bit_pattern(host: Host, dtype: torch.dtype) -> None:
    """All 65536 patterns, in 512 tensors of 128 consecutive ones, and counted in one."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    xs = list(bits.split(128))
    assert same(host.ranges(xs), torch.stack([_reference.abs_range(x) for x in xs]))
    assert same(host.health(bits), _reference.health(bits))


def test_many_tensors_in_one_launch(host: Host) -> None:
    """Tensors of every format and many sizes, empty ones among them, keep their order and take two launches."""
    xs = [
        random_bits(dtype, count, seed=count)
        for count in (0, 1, 100, 0, 40_000)
        for dtype in (*FORMATS, torch.float32)
    ]
    host.launches()
    rows = host.ranges(xs)
    assert host.launches() == 2  # the reduction and the finish
    assert same(rows, torch.stack([_reference.abs_range(x) for x in xs]))


def test_more_tensors_than_fit_one_launch(host: Host) -> None:
    """Beyond the parameter limit the list is cut, and no row is lost at the cut."""
    xs = list(torch.arange(1, MAX_BATCH + 3, dtype=torch.float32).split(1))
    host.launches()
    rows = host.ranges(xs)
    assert host.launches() == 3
    assert rows[:, 0].tolist() == rows[:, 1].tolist() == list(range(1, MAX_BATCH + 3))


def test_no_tensors(host: Host) -> None:
    """An empty list launches nothing."""
    host.launches()
    assert host.ranges([]).shape == (0, 3)
    assert host.launches() == 0


def _strided_views(fill: Callable[..., torch.Tensor] = random_bits) -> dict[str, torch.Tensor]:
    x = fill(torch.float32, 6 * 7 * 8 * 9, seed=3).view(6, 7, 8, 9)
    return {
        "transposed": x.flatten(1).t(),
        "permuted": x.permute(2, 0, 3, 1),
        "columns": x.flatten(1)[:, :5],
        "steps": x[::2, ::3, :, ::2],
        "expanded inside": x[:, :1].expand(6, 7, 8, 9),
        "expanded outside": x[0].expand(5, 7, 8, 9),
        "expanded scalar": torch.tensor(float("nan")).expand(3, 4),
        "overlapping": torch.as_strided(x, (50, 20), (3, 1)),
        "0-d": x[1, 2, 3, 4],
        "offset": x.flatten()[1:].view(-1)[3:1000],
        "empty strided": x[:, :0].permute(1, 0, 2, 3),
        "size one with odd stride": torch.as_strided(x, (1, 10, 1), (7, 2, 1000)),
        "many dims": x.flatten()[: 1 << 11].view((2,) * 11).permute(*range(10, -1, -1)),
    }


@pytest.mark.parametrize("name", _strided_views())
def test_strides(host: Host, name: str) -> None:
    """Strided, expanded and overlapping views give what their contiguous copy gives, position included."""
    assert_matches(host, _strided_views(random_bits)[name])
    assert_matches(host, _strided_views(random_finite)[name])


def test_first_nonfinite_in_a_permuted_tensor(host: Host) -> None:
    """The position is counted in the tensor's own order, not in memory's."""
    for element in range(24):
        x = torch.ones(4, 3, 2).permute(2, 0, 1)
        index = torch.unravel_index(torch.tensor(element), x.shape)
        x[index] = float("-inf")
        x[-1, -1, -1] = float("nan")
        row = host.health(x)
        assert row[10] == element
        assert row[5:8].tolist() == [1, 0, int(element != 23)]


def test_repeated_elements_are_counted_as_often_as_they_stand(host: Host) -> None:
    """An expanded dimension is read once and multiplies every count."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, 0.0, 1e-45, inf, nan, -inf, -inf]).view(7, 1)
    for view, first in ((x.expand(7, 5), 15), (x.t().expand(5, 7), 3)):
        row = host.health(view)
        assert row[:3].isnan().tolist() == [True, True, False]
        assert row[2:].tolist() == [0, 0, 1, 5, 5, 10, 5, 5, first]


def test_a_dense_permutation_is_one_run(host: Host) -> None:
    """A permuted dense tensor shares the flat launch; a gapped one has a launch of its own."""
    x = torch.ones(4, 5, 6)
    host.launches()
    host.ranges([x, x.permute(2, 0, 1), x.expand(3, 4, 5, 6)])
    assert host.launches() == 2
    host.ranges([x, x[:, ::2]])
    assert host.launches() == 3


def test_a_gather_larger_than_its_grid(host: Host) -> None:
    """Threads come round again when there are more elements than the grid has."""
    x = random_finite(torch.float32, 1 << 21).view(-1, 2)[:, 0]
    assert same(host.ranges([x])[0], _reference.abs_range(x))


def test_more_dimensions_than_are_walked(host: Host) -> None:
    """A tensor that does not collapse to 25 dimensions is refused with a code, not read wrongly."""
    longs = ctypes.c_int64 * 26
    spread = _Tensor(0, longs(*[2] * 26), longs(*(3**k for k in range(26))), 26, FORMATS[torch.float32])
    rows = torch.empty((1, 3), dtype=torch.float64)
    assert host.call_ranges([spread], rows) == TOO_MANY_DIMS
    assert b"dimensions" in host.library.nanwatch_cuda_error(TOO_MANY_DIMS)
    mergeable = torch.ones((1, 1, 1, 2) * 15)
    assert host.ranges([mergeable])[0].tolist() == [1, 1, 1]


def test_a_failed_launch_is_returned_and_cleared(host: Host) -> None:
    """The error of a launch comes back to the caller and is not left for the next check of somebody else's."""
    rows = torch.empty((1, 3), dtype=torch.float64)
    host.library.cuda_host_fail_next(INVALID_VALUE)
    assert host.call_ranges([_describe(torch.ones(3))], rows) == INVALID_VALUE
    assert host.library.cuda_host_pending_error() == 0


def test_a_pending_error_of_the_user_is_left_alone(host: Host) -> None:
    """An error that the user's own code left unread is neither reported as ours nor swallowed."""
    host.library.cuda_host_set_pending_error(INVALID_VALUE)
    try:
        assert host.ranges([torch.ones(3)])[0].tolist() == [1, 1, 1]
        assert host.library.cuda_host_pending_error() == INVALID_VALUE
    finally:
        host.library.cuda_host_set_pending_error(0)
