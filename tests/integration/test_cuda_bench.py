"""The range benchmark on a GPU, as far as it can be tested without one: its verdicts, and that its floor compiles."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from support.paths import BENCHMARKS

GIB = 1 << 30


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _range_cuda

    return _range_cuda


def _verdicts(bench: ModuleType, *rows: Any) -> dict[str, bool]:
    return {target.name: target.passed for target in bench.judge(rows)}


def test_bandwidth_and_shares_at_one_gibibyte(bench: ModuleType) -> None:
    """A row just within the bounds passes, one just beyond any of them is named, and float64 does not count."""
    second = GIB / 4.151e12
    at_bounds = {"nanwatch": second, "cub": 0.9701 * second, "health": second / 0.9501}
    row = bench.CudaRow("bfloat16", GIB, at_bounds, {"nanwatch": 1.0, "transformers": 8.0, "compile": 1.5})
    assert all(_verdicts(bench, row).values())
    slow = bench.CudaRow("float16", GIB, {**at_bounds, "nanwatch": second * 1.002}, {})
    targets = {target.name: target for target in bench.judge([row, slow])}
    assert not targets["TB/s at 1 GiB"].passed
    assert targets["TB/s at 1 GiB"].where == "float16, 1 GiB"
    assert not targets["share of cub::DeviceReduce at 1 GiB"].passed
    unwanted = bench.CudaRow("float64", GIB, {"nanwatch": 10 * second}, {})
    assert all(_verdicts(bench, row, unwanted).values())


def test_rivals_are_held_to_the_size_and_dtype_of_their_promise(bench: ModuleType) -> None:
    """Small and large tensors have bounds of their own against transformers, bfloat16 one against torch.compile."""
    large = bench.CudaRow("float32", 1 << 26, {"nanwatch": 1e-5}, {"nanwatch": 1.0, "transformers": 7.9})
    small = bench.CudaRow("float32", 1 << 20, {"nanwatch": 1e-5}, {"nanwatch": 1.0, "transformers": 6.0})
    found = _verdicts(bench, large, small)
    assert not found["transformers' functions, times nanwatch, from 64 MiB"]
    assert found["transformers' functions, times nanwatch, to 1 MiB"]
    brain = bench.CudaRow("bfloat16", 1 << 22, {"nanwatch": 7.1e-6}, {"nanwatch": 1.0, "compile": 1.4})
    found = _verdicts(bench, brain)
    assert not found["torch.compile, times nanwatch, bfloat16"]
    assert found["torch.compile, times nanwatch"]
    assert not found["kernel of 4 MiB, us"]


def test_xor_by_halves(bench: ModuleType) -> None:
    """The oracle of the floor folds any number of words, an odd one too."""
    for words in ([5], [5, 9], [1, 2, 4, 8, 16], list(range(1000))):
        want = 0
        for word in words:
            want ^= word
        assert bench.xor_of(torch.tensor(words, dtype=torch.int32)) == want


@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    """--device cuda ends in words where torch sees no GPU."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, str(BENCHMARKS / "bench_range.py"), "--device", "cuda", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no CUDA device" in done.stderr


@pytest.mark.slow
def test_the_floor_compiles_cleanly(tmp_path: Path) -> None:
    """nvcc compiles the plain read and CUB's reduction without a warning."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc was not found")
    command = [nvcc, "-O1", "-std=c++17", "-shared", "-arch=sm_90", "-Xcompiler=-fPIC,-Wall,-Wextra"]
    command += [str(BENCHMARKS / "floor_cuda.cu"), "-o", str(tmp_path / "floor.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout + done.stderr
