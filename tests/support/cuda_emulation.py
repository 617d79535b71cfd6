"""The CUDA sources as host code: compiled with g++ against a stand-in for CUDA and called through ctypes.

The very text that nvcc compiles runs here, one fibre per CUDA thread (tests/native/cuda_host/cuda_runtime.h).
"""

import ctypes
import fcntl
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from nanwatch.numerics import _reference
from support.paths import CUDA_HOST, ROOT

BUILT = ROOT / "build" / "cuda_host"
# What the CUDA sources read, and its number in the C ABI.
FORMATS = {dtype: form.number for dtype, form in _reference.FORMATS.items() if form.kind != "complex"}

dtypes = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
# A misaligned load is a fault on a GPU and nothing on x86: the sanitizer makes it an error here too.
SANITIZERS = ["-fsanitize=alignment,shift", "-fno-sanitize-recover=all", "-static-libubsan"]


@functools.cache
def build(source: str) -> ctypes.CDLL:
    """Return the library made of tests/native/cuda_host/`source`. Skip the test where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ was not found: the CUDA source cannot be compiled for the host")
    BUILT.mkdir(parents=True, exist_ok=True)
    library, part = BUILT / f"{source}.so", BUILT / f"{source}.part"
    read = [path for folder in (ROOT / "csrc", CUDA_HOST) for path in folder.rglob("*.[chc]*")]
    # -O1 compiles in 10 s what takes 20 s with -O2 -g, and runs the tests as fast.
    command = [compiler, "-std=c++17", "-O1", *WARNINGS, *SANITIZERS, "-shared", "-fPIC"]
    command += [f"-I{CUDA_HOST}", f"-I{ROOT / 'csrc'}", str(CUDA_HOST / source), "-o", str(part)]
    # One process of a test run compiles, and the others wait for it.
    with (BUILT / f"{source}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(path.stat().st_mtime for path in [*read, Path(__file__)])
        if not library.exists() or library.stat().st_mtime < newest:
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            part.rename(library)
    return ctypes.CDLL(str(library))


class DescribedTensor(ctypes.Structure):
    """NanwatchTensor of csrc/cuda/range_cuda.h."""

    _fields_ = (("data", ctypes.c_void_p), ("numel", ctypes.c_int64), ("format", ctypes.c_int32))


def describe(x: torch.Tensor) -> DescribedTensor:
    return DescribedTensor(x.data_ptr(), x.numel(), FORMATS[x.dtype])


class Row(ctypes.Structure):
    """NanwatchRow."""

    _fields_ = (
        *(("values", ctypes.c_double * 12), ("examined", ctypes.c_double)),
        *(("reserved", ctypes.c_uint64 * 2), ("stamp", ctypes.c_uint64)),
    )


class Host:
    """range_cuda.h through ctypes, with host memory where the kernels expect a GPU's."""

    def __init__(self) -> None:
        self.library = build("host.cpp")
        self.library.nanwatch_cuda_error.restype = ctypes.c_char_p
        self.library.nanwatch_cuda_workspace.restype = ctypes.c_size_t
        for name in ("launches", "blocks"):
            getattr(self.library, f"cuda_host_{name}").restype = ctypes.c_int64
        # One for all calls, as on a stream: each must leave it zero for the next.
        self.workspace = torch.zeros(self.library.nanwatch_cuda_workspace(), dtype=torch.uint8)

    def _call(self, function: str, xs: list[torch.Tensor], *more: Any) -> int:
        array = (DescribedTensor * max(len(xs), 1))(*map(describe, xs))
        workspace = ctypes.c_void_p(self.workspace.data_ptr())
        code = getattr(self.library, function)(array, ctypes.c_int64(len(xs)), *more, workspace, 0, None)
        assert not self.workspace.any(), "the workspace is not zero after a call"
        return int(code)

    def call_ranges(self, xs: list[torch.Tensor], rows: torch.Tensor) -> int:
        return self._call("nanwatch_cuda_ranges", xs, ctypes.c_void_p(rows.data_ptr()))

    def ranges(self, xs: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.full((len(xs), 3), -7.0, dtype=torch.float64)
        assert self.call_ranges(xs, rows) == 0
        return rows

    def observe(self, xs: list[torch.Tensor], first: int = 1) -> list[tuple[list[float], bool, int]]:
        """Each tensor's values, whether it was examined, and the stamp."""
        rows = (Row * max(len(xs), 1))()
        assert self._call("nanwatch_cuda_observe", xs, rows, ctypes.c_uint64(first)) == 0
        return [(list(row.values), bool(row.examined), int(row.stamp)) for row in rows[: len(xs)]]

    def launches(self) -> int:
        return int(self.library.cuda_host_launches())

    def blocks(self) -> int:
        return int(self.library.cuda_host_blocks())

    def shuffle_blocks(self, seed: int) -> None:
        """From here on blocks run in an order drawn from `seed`; 0: in order."""
        self.library.cuda_host_shuffle_blocks(seed)


@functools.cache
def host() -> Host:
    return Host()


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal element for element on the host, a nan equal to a nan."""
    is_equal = got.shape == expected.shape
    return is_equal and torch.allclose(got.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def reference(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_reference.abs_range(x) for x in xs])
