"""The CUDA sources as host code: compiled with g++ against a stand-in for CUDA and called through ctypes.

The very text that nvcc compiles runs here, one fibre per CUDA thread (tests/native/cuda_host/cuda_runtime.h).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from nanwatch.numerics import _reference
from support.paths import CUDA_HOST, ROOT

BUILT = ROOT / "build" / "cuda_host"
# One for each path through the sources: without minima of 16-bit halves and reductions over a warp, and with.
ARCHITECTURES = [pytest.param(750, id="sm_75", marks=pytest.mark.slow), pytest.param(900, id="sm_90")]

# What the CUDA sources read, and its number in the C ABI.
FORMATS = {dtype: form.number for dtype, form in _reference.FORMATS.items() if form.kind != "complex"}

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
# A misaligned load is a fault on a GPU and nothing on x86: the sanitizer makes it an error here too.
SANITIZERS = ["-fsanitize=alignment,shift", "-fno-sanitize-recover=all", "-static-libubsan"]


@functools.cache
def build(source: str, *options: str) -> ctypes.CDLL:
    """The library made of tests/native/cuda_host/`source`; skips the test where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ was not found: the CUDA source cannot be compiled for the host")
    # -O1 compiles in 10 s what takes 20 s with -O2 -g, and runs the tests as fast.
    command = [compiler, "-std=c++17", "-O1", *WARNINGS, *SANITIZERS, *options, "-shared", "-fPIC"]
    command += [
        f"-I{CUDA_HOST}",
        f"-I{ROOT / 'csrc'}",
        str(CUDA_HOST / source),
    ]
    BUILT.mkdir(parents=True, exist_ok=True)
    name = f"{Path(source).stem}-{digest(*options)}"
    library = BUILT / f"{name}-{digest(*command, version(compiler), *sources())}.so"
    # One process of a test run compiles, and the others wait for it.
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            for older in BUILT.glob(f"{name}-*.so"):
                older.unlink()
            unfinished = library.with_suffix(".part")
            done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            unfinished.rename(library)
    return ctypes.CDLL(str(library))


def digest(*texts: str) -> str:
    """A few letters that stand for these texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def version(compiler: str) -> str:
    """Return the version that it reports."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def sources() -> list[str]:
    """All that may be included."""
    folders = ROOT / "csrc", CUDA_HOST
    return [
        path.read_text()
        for folder in folders
        for path in sorted(folder.rglob("*.*"))
        if path.suffix != ".pyc"
    ]


class DescribedTensor(ctypes.Structure):
    """NanwatchTensor of csrc/cuda/range_cuda.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("dims", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


def describe(x: torch.Tensor, address: int | None = None) -> DescribedTensor:
    longs = ctypes.c_int64 * max(x.dim(), 1)
    data = x.data_ptr() if address is None else address
    return DescribedTensor(data, longs(*x.shape), longs(*x.stride()), x.dim(), FORMATS[x.dtype])


class Host:
    """range_cuda.h through ctypes, with host memory where the kernels expect a GPU's."""

    def __init__(self, architecture: int) -> None:
        self.library = build("host.cpp", f"-DNANWATCH_CUDA_ARCH={architecture}")
        self.library.nanwatch_cuda_error.restype = ctypes.c_char_p
        self.library.nanwatch_cuda_workspace.restype = ctypes.c_size_t
        for name in ("launches", "blocks", "clears", "waits"):
            getattr(self.library, f"cuda_host_{name}").restype = ctypes.c_int64
        # One for all calls, as on a stream: each must leave it zero for the next.
        self.workspace = torch.zeros(self.library.nanwatch_cuda_workspace(), dtype=torch.uint8)

    def call_ranges(self, described: list[DescribedTensor], rows: torch.Tensor) -> int:
        array = (DescribedTensor * max(len(described), 1))(*described)
        code: int = self.library.nanwatch_cuda_ranges(
            array,
            ctypes.c_int64(len(described)),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(self.workspace.data_ptr()),
            0,
            None,
        )
        assert not self.workspace.any(), "the workspace is not zero after a call"
        return code

    def ranges(self, xs: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.full((len(xs), 3), -7.0, dtype=torch.float64)
        assert self.call_ranges([describe(x) for x in xs], rows) == 0
        return rows

    def health(self, x: torch.Tensor) -> torch.Tensor:
        row = torch.full((11,), -7.0, dtype=torch.float64)
        described = describe(x)
        error = self.library.nanwatch_cuda_health(
            ctypes.byref(described),
            ctypes.c_void_p(row.data_ptr()),
            ctypes.c_void_p(self.workspace.data_ptr()),
            0,
            None,
        )
        assert error == 0
        assert not self.workspace.any(), "the workspace is not zero after a call"
        return row

    def launches(self) -> int:
        """Kernel launches since the last call of this."""
        return int(self.library.cuda_host_launches())

    def blocks(self) -> int:
        """Blocks launched since the last call of this."""
        return int(self.library.cuda_host_blocks())

    def shuffle_blocks(self, seed: int) -> None:
        """From here on blocks run in an order drawn from `seed`; 0: in order."""
        self.library.cuda_host_shuffle_blocks(seed)


@functools.cache
def host(architecture: int) -> Host:
    """The one instance for this architecture."""
    return Host(architecture)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal element for element, a nan equal to a nan."""
    return torch.equal(got.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)) and torch.equal(
        got.isnan(), expected.isnan()
    )
