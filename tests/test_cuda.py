"""What only a GPU can show about the CUDA kernels, and what the compiled CUDA part does where there is none."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanwatch import _extension, _ops, _reference

ROOT = Path(__file__).resolve().parent.parent
NO_GPU_ERRORS = (35, 100)  # insufficient driver (none at all, too), no device


def _missing() -> str:
    """Why the CUDA kernels cannot be tested here, or "" if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if _extension.C is None:
        return f"the compiled part is missing: {_extension.reason}"
    return "" if _extension.C.cuda_compiled() else "the compiled part was built without CUDA"


@pytest.fixture
def cuda() -> torch.device:
    if reason := _missing():
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal element for element on the host, a nan equal to a nan."""
    return torch.allclose(got.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def any_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    high = 2 if dtype == torch.bool else 256
    words = torch.randint(0, high, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return words.view(dtype)


def every_row(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_reference.abs_range(x) for x in xs])


@pytest.mark.cuda
@pytest.mark.parametrize(
    "dtype",
    sorted(_reference.READABLE_DTYPES, key=str),
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("count", [0, 1, 17, 4097, 300_001])
def test_any_bits_of_any_dtype(cuda: torch.device, dtype: torch.dtype, count: int) -> None:
    """Rows made on the GPU equal the reference's rows of the same bits on the CPU."""
    if dtype.is_complex:  # its modulus is rounded by each device's own hypot: plain numbers, and a tolerance
        x = torch.randn(max(count, 1), dtype=torch.complex64).to(dtype)
        assert torch.allclose(_ops.abs_range(x.to(cuda)).cpu(), _reference.abs_range(x), rtol=1e-6, atol=0)
        return
    x = any_bits(dtype, count)
    on_gpu = x.to(cuda)
    assert same(_ops.abs_range(on_gpu), _reference.abs_range(x))
    assert same(_ops.health(on_gpu), _reference.health(x))


@pytest.mark.cuda
def test_many_tensors_many_dtypes(cuda: torch.device) -> None:
    """One call over more tensors than a launch takes, of mixed dtypes, keeps every row in its place."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn, torch.complex64]
    xs = [any_bits(dtypes[i % 5], i % 300) for i in range(2500)] + [torch.tensor([3 + 4j])]
    assert same(_ops.abs_ranges([x.to(cuda) for x in xs]), every_row(xs))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, :7],
        lambda x: x[::2, ::3],
        lambda x: x[:1].expand(50, -1),
        lambda x: x.flatten()[1:],
        lambda x: torch.as_strided(x, (500, 20), (3, 1)),
        lambda x: torch._neg_view(x),
    ],
    ids=["transposed", "columns", "steps", "expanded", "offset", "overlapping", "negative"],
)
def test_views(cuda: torch.device, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Views are read in place and give what their copy gives."""
    x = any_bits(torch.float32, 64 * 65).view(64, 65)
    on_gpu = view(x.to(cuda))
    assert same(_ops.abs_range(on_gpu), _reference.abs_range(view(x)))
    assert same(_ops.health(on_gpu), _reference.health(view(x)))


@pytest.mark.cuda
def test_the_current_stream_is_used(cuda: torch.device) -> None:
    """A range asked for on a side stream sees what that stream wrote before, with no synchronisation between."""
    stream = torch.cuda.Stream(cuda)
    x = torch.zeros(1 << 24, device=cuda)
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # long enough that a read on another stream would come first
        x.fill_(5)
        row = _ops.abs_range(x)
    stream.synchronize()
    assert row.tolist() == [5, 5, 1]


@pytest.mark.cuda
def test_a_cuda_graph_captures_and_replays(cuda: torch.device) -> None:
    """All three operators may be captured, and a replay reads the values of its own time."""
    x, y = torch.ones(100_000, device=cuda), torch.ones(64, 64, device=cuda)[:, ::2]
    _ops.abs_ranges([x, y])  # loads the kernels outside the capture
    _ops.health(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row, rows, health = _ops.abs_range(x), _ops.abs_ranges([x, y]), _ops.health(x)
    x[777] = float("inf")
    y.fill_(2)
    graph.replay()
    assert row.tolist() == [1, float("inf"), 0]
    assert rows.tolist() == [[1, float("inf"), 0], [2, 2, 1]]
    assert (health[6].item(), health[10].item()) == (1, 777)


@pytest.mark.cuda
def test_no_synchronisation(cuda: torch.device) -> None:
    """The operators enqueue work and do not wait for it."""
    x = torch.ones(1000, device=cuda)
    torch.cuda.synchronize(cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _ops.abs_range(x)
        _ops.abs_ranges([x, x[::2]])
        _ops.health(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_every_device(cuda: torch.device) -> None:
    """A tensor on another device than the current one is read there, and the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    for index in range(torch.cuda.device_count()):
        row = _ops.abs_range(torch.full((10,), float(index), device=f"cuda:{index}"))
        assert row.device.index == index
        assert row.tolist() == [index, index, 1]
    assert torch.cuda.current_device() == cuda.index
    with pytest.raises(ValueError, match="device"):
        _ops.abs_ranges([torch.ones(1, device="cuda:0"), torch.ones(1, device="cuda:1")])


@pytest.mark.cuda
@pytest.mark.slow
def test_more_than_two_to_the_31_elements(cuda: torch.device) -> None:
    """Sizes and positions are 64-bit, flat and strided."""
    count = (1 << 31) + 12_345
    if torch.cuda.mem_get_info(cuda)[0] < count + (1 << 30):
        pytest.skip("less than 3.2 GB of GPU memory is free")
    x = torch.ones(count, dtype=torch.float8_e5m2, device=cuda)
    x.view(torch.uint8)[-1] = 0x7C  # inf
    assert _ops.abs_range(x).tolist() == [1, float("inf"), 0]
    assert _ops.health(x)[10].item() == count - 1
    # 0x3c is 1.0: every second element, the last of them the inf.
    assert _ops.health(x[(count - 1) % 2 :: 2])[10].item() == (count - 1) // 2


def test_import_does_not_touch_cuda() -> None:
    """Importing nanwatch and reading a CPU tensor neither initialises CUDA in torch nor loads the driver."""
    script = (
        "import torch\n"
        "driver = lambda: 'libcuda.so' in open('/proc/self/maps').read()\n"
        "before = driver()\n"
        "import nanwatch._ops as ops\n"
        "ops.abs_range(torch.ones(3))\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert driver() == before\n"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("/proc/self/maps is how this test sees which libraries are loaded")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_kernels_compile_cleanly_and_report_a_missing_gpu(tmp_path: Path) -> None:
    """nvcc compiles the source without a warning, and without a driver a call returns an error in words."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc was not found")
    library = tmp_path / "range_cuda.so"
    command = [nvcc, "-shared", "-O1", "-std=c++17", "-arch=sm_75", "-cudart=static"]
    command += ["-Xcompiler=-fPIC,-Wall,-Wextra", str(ROOT / "csrc/range_cuda.cu"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout + done.stderr
    if torch.cuda.is_available():
        pytest.skip("compiled cleanly; this machine has a GPU")
    kernels = ctypes.CDLL(str(library))
    kernels.nanwatch_cuda_error.restype = ctypes.c_char_p
    # A tensor of no dimensions with null for everything: the error comes before anything is looked at.
    tensor = ctypes.create_string_buffer(64)
    error = kernels.nanwatch_cuda_ranges(tensor, ctypes.c_int64(1), None, None, 0, None)
    assert error in NO_GPU_ERRORS
    assert kernels.nanwatch_cuda_error(error)
