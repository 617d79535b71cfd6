"""The operators' CUDA part over the stand-in for CUDA: who serves a tensor, and what the errors say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

OPERATORS_SCRIPT = """
import ctypes, sys, warnings
import torch
from nanwatch import _ops, _reference

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

x = torch.randn(100, requires_grad=True)
launches()
check(_ops.abs_range(x), _reference.abs_range(x))
assert launches() == 2 and not _ops.abs_range(x).requires_grad

# Complex goes to the reference, alone and in a list, and disturbs no neighbour.
c = torch.randn(5, dtype=torch.complex64)
launches()
check(_ops.abs_range(c), _reference.abs_range(c))
assert launches() == 0
xs = [x, c, torch.empty(0, dtype=torch.int8), torch.tensor(float("nan")), x[::2]]
check(_ops.abs_ranges(xs), torch.stack([_reference.abs_range(each) for each in xs]))
assert launches() == 3

# The lazy negative bit: the sign of an inf counts in a health.
n = torch._neg_view(torch.tensor([float("inf"), 1.0]))
check(_ops.health(n), _reference.health(n))

# What cannot be walked or run here is served by the reference; what went wrong is an error.
launches()
many = torch.as_strided(torch.ones(1000), (1, 2) * 9, (1, 3) * 9)
check(_ops.abs_range(many), _reference.abs_range(many))
for code in (35, 209, 222, 223):
    for op, argument in ((_ops.abs_range, x), (_ops.health, x), (_ops.abs_ranges, [x, c])):
        library.cuda_host_fail_next(code)
        check(op(argument), getattr(_reference, op.__name__)(argument))
library.cuda_host_fail_next(700)
assert "CUDA error 700" in message(RuntimeError, _ops.abs_range, x)

freed = torch.ones(100)
freed.untyped_storage().resize_(0)
assert "freed or resized" in message(ValueError, _ops.abs_range, freed)
packed = torch.zeros(4, dtype=torch.float4_e2m1fn_x2)
assert "float4_e2m1fn_x2" in message(TypeError, _ops.abs_range, packed)
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
    flags += [f"-I{ROOT / 'tests/cuda_host'}", f"-I{ROOT / 'csrc'}"]
    flags += [f"-isystem{home / 'include'}", f"-isystem{home / 'include/torch/csrc/api/include'}"]
    source = str(ROOT / "tests/cuda_host/ops_host.cpp")
    link = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(library)]
    done = subprocess.run([compiler, *flags, source, *link], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Without the compiled part the CPU key is free, and a process of its own keeps it that way for other tests.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NANWATCH_EXT": "0"}
    command = [sys.executable, "-c", OPERATORS_SCRIPT, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("CUDA kernels cannot run here") == 1
