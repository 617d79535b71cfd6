"""Answers of the compiled CUDA part where there is no GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from support.paths import ROOT

NO_GPU_ERRORS = (35, 100)  # insufficient driver (none at all, too), no device


@pytest.mark.slow
def test_the_kernels_compile_cleanly_and_report_a_missing_gpu(tmp_path: Path) -> None:
    """nvcc compiles the sources without a warning, and without a driver a call returns an error in words."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc was not found")
    library = tmp_path / "kernels.so"
    command = [nvcc, "-shared", "-O1", "-std=c++17", "-arch=sm_75", "-cudart=static"]
    command += [f"-I{ROOT / 'csrc'}", "-Xcompiler=-fPIC,-Wall,-Wextra"]
    command += [*map(str, sorted(ROOT.glob("csrc/cuda/*.cu"))), "-o", str(library)]
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
