"""The build: what it gives where it cannot compile, what it refuses, and what it records."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from support.paths import ROOT

pytestmark = [pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")]

# Not the real source: it takes a minute, `make` compiles it anyway, and these tests are about what goes around it.
TINY_MODULE = """
#include <Python.h>
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&def); }
"""

FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 12.9, V12.9.1" ;;
  *--dryrun*) echo "#$ TOP={home}" ;;
  *--list-gpu-code*) printf 'sm_75\\nsm_80\\nsm_90\\nsm_90a\\nsm_120\\n' ;;
  *) {compile} ;;
esac
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a source distribution holds, without anything built."""
    copy = tmp_path / "source"
    ignore = shutil.ignore_patterns("*.so", "_build.json", "__pycache__", "*.egg-info")
    for folder in ("csrc", "python"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for file in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.fixture
def tiny(source: Path) -> Path:
    """The copy with a C++ source that compiles in a second, and without the CUDA source."""
    for path in (source / "csrc").rglob("*.c*"):
        path.unlink()
    (source / "csrc" / "bindings.cpp").write_text(TINY_MODULE)
    return source


SWITCHES = "NANWATCH", "FORCE_", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "PYTHONPATH"


def python(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the switches that `make test` or a developer may have set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SWITCHES)}
    scripts = str(Path(sys.executable).parent)  # ninja lies beside this Python
    env = {**kept, "PATH": f"{scripts}{os.pathsep}{kept['PATH']}", **changes}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)


def pip_wheel(source: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    words = "-m pip wheel --no-build-isolation --no-deps -v -w wheels ."
    return python(source, *words.split(), **changes)


def build_in_place(source: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return python(source, "setup.py", "build_ext", "--inplace", **changes)


def facts(source: Path) -> dict[str, str]:
    return json.loads((source / "python" / "nanwatch" / "_build.json").read_text())


def unpack(source: Path) -> tuple[Path, str]:
    """Unpack the one wheel that was built. Return where, and its name."""
    (wheel,) = (source / "wheels").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(source / "installed")
    return source / "installed", wheel.name


USE = """
import warnings, torch, nanwatch
from nanwatch.numerics import _extension
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        assert tuple(nanwatch.abs_range(torch.tensor([1.0, -3.0]))) == (1.0, 3.0, True)
    assert nanwatch.tensor_health(torch.tensor([1.0, float("nan")])).num_nan == 1
assert _extension.C is None
print(len([w for w in seen if w.category is RuntimeWarning]), [str(w.message) for w in seen])
print(_extension.reason)
"""


def with_broken_source(source: Path, folder: Path) -> dict[str, str]:
    for path in (source / "csrc").rglob("*.cpp"):
        path.unlink()
    (source / "csrc" / "broken.cpp").write_text("int broken = ;\n")
    return {"FORCE_CPU": "1"}


def without_torch(source: Path, folder: Path) -> dict[str, str]:
    (folder / "stub").mkdir()
    (folder / "stub" / "torch.py").touch()
    return {"PYTHONPATH": str(folder / "stub")}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda *_: {"CXX": "/bin/false", "CC": "/bin/false"}, "no working C++ compiler"),
        (with_broken_source, "could not be built"),
        (without_torch, "has no headers"),
    ],
)
def test_a_build_that_cannot_compile_gives_a_pure_wheel_that_works_and_says_why(
    source, tmp_path, spoil, reason
):
    """Loud at build time, right in its answers, and the reason is told at first use, once, and by the doctor."""
    done = pip_wheel(source, **spoil(source, tmp_path))
    assert done.returncode == 0, done.stderr
    spoken = done.stdout + done.stderr
    assert spoken.count("WITHOUT its compiled part") == 1
    assert reason in spoken
    assert "--no-build-isolation" in spoken

    place, name = unpack(source)
    assert name.endswith("-py3-none-any.whl")
    assert not list(place.glob("nanwatch/_C*.so"))
    used = python(place, "-c", USE, PYTHONPATH=str(place))
    assert used.returncode == 0, used.stderr
    warned, told = used.stdout.splitlines()
    assert warned.startswith("1 ")
    assert reason in warned
    assert reason in told

    doctor = python(place, "-m", "nanwatch", "--json", PYTHONPATH=str(place))
    compiled = json.loads(doctor.stdout)["compiled part"]
    assert compiled.startswith("MISSING: ")
    assert reason in compiled


def test_require_ext_makes_a_failed_build_an_error(source):
    """With NANWATCH_REQUIRE_EXT=1 there is no wheel, and the reason is in the output."""
    done = pip_wheel(source, NANWATCH_REQUIRE_EXT="1", CXX="/bin/false", CC="/bin/false")
    assert done.returncode != 0
    assert "no working C++ compiler" in done.stdout + done.stderr
    assert not list((source / "wheels").glob("*.whl"))


def test_a_build_leaves_nothing_of_the_one_before(tiny):
    """A module of an earlier source would answer for another one. The recorded torch decides whether one is loaded."""
    for _ in range(2):
        assert build_in_place(tiny, CXX="/bin/false").returncode == 0
        assert not list(tiny.glob("python/nanwatch/_C*.so"))
        assert "C++ compiler" in facts(tiny)["failure"]
        assert build_in_place(tiny, FORCE_CPU="1").returncode == 0
        assert list(tiny.glob("python/nanwatch/_C*.so"))
        assert facts(tiny)["torch"] == torch.__version__
        assert facts(tiny)["cuda_reason"] == "built with FORCE_CPU=1"
        assert "failure" not in facts(tiny)


def make_toolkit(home: Path, compile_command: str) -> Path:
    """Make a stand-in for CUDA_HOME whose nvcc compiles by this command."""
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    subprocess.run(["ar", "rcs", str(home / "lib64" / "libcudart_static.a")], check=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(FAKE_NVCC.format(home=home, compile=compile_command))
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return home


def fake_torch(package: Path, version: str, cuda: str | None = None) -> None:
    """Make a torch that has this version and the headers of the installed one."""
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    (package / "include").symlink_to(Path(torch.__file__).parent / "include")


def test_a_build_of_several_versions_of_torch_gives_one_wheel_with_a_module_for_each(tiny):
    """No torch is asked for at build time; each module names the libraries of torch, and no OpenMP of its own."""
    for minor in ("2.1", "2.2"):
        fake_torch(tiny / "build" / "torch-headers" / minor / "torch", f"{minor}.3")
    (tiny / "hidden").mkdir()
    (tiny / "hidden" / "torch.py").write_text('raise ImportError("torch is hidden")\n')
    switches = {"NANWATCH_TORCH": "2.1 2.2", "NANWATCH_REQUIRE_EXT": "1", "CC": "false"}
    done = pip_wheel(tiny, PYTHONPATH=str(tiny / "hidden"), **switches)
    assert done.returncode == 0, done.stdout + done.stderr
    place, _ = unpack(tiny)
    names = {path.name.partition(".cpython")[0] for path in (place / "nanwatch").glob("*.so")}
    assert names == {"_C-torch2.1", "_C-torch2.2"}
    assert json.loads((place / "nanwatch" / "_build.json").read_text())["torch"] == "2.1.3 2.2.3"
    for path in (place / "nanwatch").glob("*.so"):
        dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True).stdout
        assert "[libtorch_cpu.so]" in dynamic
        assert "gomp" not in dynamic


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CUDA part is built on Linux only")
def test_an_nvcc_that_fails_costs_the_cuda_part_and_nothing_else(tiny, tmp_path):
    """The CPU part is built, the loss is loud and recorded, and FORCE_CUDA=1 makes it an error."""
    (tiny / "csrc" / "cuda" / "range_cuda.cu").touch()
    home = str(make_toolkit(tmp_path / "cuda", "exit 1"))
    fake_torch(tmp_path / "stub" / "torch", torch.__version__, "12.9")  # says that it has CUDA
    done = build_in_place(tiny, CUDA_HOME=home, PYTHONPATH=str(tmp_path / "stub"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without its CUDA part" in done.stderr
    assert "could not be built" in facts(tiny)["cuda_reason"]
    assert list(tiny.glob("python/nanwatch/_C*.so"))
    forced = build_in_place(tiny, CUDA_HOME=home, FORCE_CUDA="1")
    assert forced.returncode != 0
    assert "could not be built" in forced.stdout + forced.stderr
