"""The operators' CUDA part over the stand-in for CUDA: who serves a tensor, and what the errors say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from support.paths import ROOT
from support.processes import environment

OPERATORS_SCRIPT = """
import ctypes, sys, warnings
import torch
from nanwatch.numerics import _extension, _reference

torch.ops.load_library(sys.argv[1])
library = ctypes.CDLL(sys.argv[1])
launches = library.cuda_host_launches

def check(got, expected):
    assert torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True), (got, expected)

def message(error, call, *arguments):
    try:
        call(*arguments)
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__}")

clears, waits = library.cuda_host_clears, library.cuda_host_waits
x = torch.randn(100, requires_grad=True)
launches()
check(_extension.abs_range(x), _reference.abs_range(x))
assert launches() == 1 and not _extension.abs_range(x).requires_grad
assert clears() == 1  # the stream's workspace, once
check(_extension.abs_range(x), _reference.abs_range(x))
assert clears() == 0 and waits() == 0

# Complex goes to the reference, alone and in a list, and disturbs no neighbour.
c = torch.randn(5, dtype=torch.complex64)
launches()
check(_extension.abs_range(c), _reference.abs_range(c))
assert launches() == 0
xs = [x, c, torch.empty(0, dtype=torch.int8), torch.tensor(float("nan")), x[::2]]
check(_extension.abs_ranges(xs), torch.stack([_reference.abs_range(each) for each in xs]))
assert launches() == 1

# A run between two elements is copied, the reference serves what cannot run here, and what went wrong is an error.
crooked = torch.frombuffer(bytearray(2 * 500 + 1), dtype=torch.float16, offset=1, count=500)
check(_extension.abs_range(crooked), _reference.abs_range(crooked))
for code in (35, 209, 222, 223):
    for op, argument in ((_extension.abs_range, x), (_extension.abs_ranges, [x, c])):
        library.cuda_host_fail_next(code)
        check(op(argument), getattr(_reference, op.__name__.partition(".")[0])(argument))
library.cuda_host_fail_next(700)
assert "CUDA error 700" in message(RuntimeError, _extension.abs_range, x)

# The recorder waits for CUDA, but not in a capture, which a wait would end; and some errors are for good.
from support.stand_in_device import Backend

library.ops_host_backend.restype = ctypes.c_void_p
backend, stream = Backend.from_address(library.ops_host_backend()), ctypes.c_void_p()
waits()
assert backend.wait(0, stream) == 0 and waits() == 1
library.cuda_host_set_capturing(1)
assert backend.wait(0, stream) == -4 and waits() == 0
library.cuda_host_set_capturing(0)
assert [bool(backend.cannot_run(code)) for code in (700, -4, -5, 35, 209)] == [False] * 3 + [True] * 2

freed = torch.ones(100)
freed.untyped_storage().resize_(0)
assert "freed or resized" in message(ValueError, _extension.abs_range, freed)
packed = torch.zeros(4, dtype=torch.float4_e2m1fn_x2)
assert "float4_e2m1fn_x2" in message(TypeError, _extension.abs_range, packed)
"""


@pytest.mark.slow
def test_operators_choose_between_kernel_and_reference(tmp_path: Path) -> None:
    """With the CUDA part registered for the CPU: what the kernels read, what the reference serves, what fails."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ was not found: the CUDA source cannot be compiled for the host")
    library = tmp_path / "ops_host.so"
    home = Path(torch.__file__).parent
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{ROOT / 'tests/native/cuda_host'}", f"-I{ROOT / 'csrc'}"]
    flags += [f"-isystem{home / 'include'}", f"-isystem{home / 'include/torch/csrc/api/include'}"]
    flags += [f"-isystem{sysconfig.get_path('include')}"]
    source = str(ROOT / "tests/native/cuda_host/ops_host.cpp")
    link = [f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch_python", "-lc10", "-o", str(library)]
    done = subprocess.run([compiler, *flags, source, *link], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Without the compiled part the CPU key is free, and a process of its own keeps it that way for other tests.
    command = [sys.executable, "-c", OPERATORS_SCRIPT, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(NANWATCH_EXT="0"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("CUDA kernels cannot run here") == 1
