"""The CPU kernels under the sanitizers, against the scalar reduction; see range_fuzz/fuzz.cpp."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_no_kernel_reads_outside_the_tensor_or_differs_from_the_scalar_reduction(tmp_path: Path) -> None:
    """Ragged, strided and misaligned memory of the exact size, every format and instruction set."""
    program = tmp_path / "fuzz"
    kernels = sorted((ROOT / "csrc/cpu").glob("range_kernels_*.cpp"))
    flags = [
        "-std=c++20",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        f"-I{ROOT / 'csrc'}",
    ]
    objects = []
    # 14 s of a core and two runs of 9 s. All at -O1 takes 36 s to compile, all at -O0 40 s to run.
    for source, level in (
        (ROOT / "tests/native/range_fuzz/fuzz.cpp", "-O1"),
        *((one, "-O0") for one in kernels),
    ):
        objects.append(str(tmp_path / f"{source.stem}.o"))
        command = [str(COMPILER), *flags, level, "-c", str(source), "-o", objects[-1]]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    build = subprocess.run(
        [str(COMPILER), *flags, *objects, "-o", str(program)], capture_output=True, text=True
    )
    if build.returncode and "cannot find" in build.stderr and "san" in build.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert build.returncode == 0, build.stderr
    for seed in ("1", "2"):
        run = subprocess.run([str(program), seed, "20000"], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
        assert " 0 differ" in run.stdout
