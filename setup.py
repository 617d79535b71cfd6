"""Builds the one compiled module, nanwatch._C. Everything static about the package is in pyproject.toml.

A failing build must not take the library away, and must not go unnoticed: the install goes on in pure Python, one
message says what was lost, and nanwatch/_build.json keeps the reason, because pip hides a build's output. The first
use of the fallback and `python -m nanwatch` read it back (see python/nanwatch/numerics/_extension.py).

Environment
    NANWATCH_REQUIRE_EXT=1   a build without the compiled part, or with its CUDA part broken, is an error
    FORCE_CUDA=1             a build without the CUDA part is an error
    FORCE_CPU=1              leave the CUDA part out even where nvcc is present
    TORCH_CUDA_ARCH_LIST     GPU architectures, as PyTorch reads it: "8.0;9.0+PTX" or "Hopper"; what this nvcc
                             cannot compile for is left out
    CUDA_HOME, CXX, MAX_JOBS as PyTorch's own extension builder reads them
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import setuptools

if (
    int(setuptools.__version__.split(".")[0]) < 77
):  # the first that reads `license = "Apache-2.0"` in pyproject.toml
    raise SystemExit(
        f"nanwatch: setuptools {setuptools.__version__} is too old for this build, which needs 77 or newer. "
        'Run  pip install "setuptools>=77" wheel pybind11 ninja  first, or build without --no-build-isolation.'
    )

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"  # where includes begin
# From Turing to Blackwell: one binary for every generation PyTorch still builds for, and PTX for what comes after.
DEFAULT_ARCHS = ("75", "80", "86", "89", "90", "100", "120")
# PyTorch's names, those with a suffix before those without: the first that fits is taken.
NAMED_ARCHS = {
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0;5.2+PTX",
    "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
RETRY = "pip install --no-build-isolation --force-reinstall --no-deps -v ."


class BuildError(Exception):
    """Why the compiled part, or its CUDA part, cannot be built here, in words for the user."""


def switched_on(name: str) -> bool:
    """True for NAME=1, False for NAME=0, empty or unset; anything else ends the build."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"nanwatch: {name}={value!r} is not understood; set it to 1 (on) or 0 (off).")
    return value == "1"


def sources_with(suffix: str) -> list[Path]:
    """Return the sources of csrc/ with this suffix, relative to the root; BuildError if there are none."""
    found = sorted(path.relative_to(ROOT) for path in CSRC.rglob(f"*{suffix}"))
    if not found:
        raise BuildError(f"csrc/ has no *{suffix}: the source tree is not complete")
    return found


# CUDA ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolkit:
    """The parts of one CUDA toolkit that a torch-free build needs."""

    nvcc: str
    version: str
    runtime: Path  # libcudart_static.a
    archs: tuple[str, ...]  # what this nvcc can compile for: "75", "90", "90a", …


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME or CUDA_PATH, else the one on PATH, else the one in /usr/local/cuda."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (found := shutil.which("nvcc", path=str(Path(home, "bin")))):
            return found
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def output_of(command: list[str]) -> str:
    """stdout and stderr of a short command; BuildError when it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"`{shlex.join(command)}` did not run: {error}") from error
    text = done.stdout + done.stderr
    if done.returncode != 0:
        raise BuildError(f"`{shlex.join(command)}` failed ({done.returncode}): {text.strip()[-400:]}")
    return text


def read_toolkit(nvcc: str) -> Toolkit:
    version = re.search(r"release (\d+\.\d+)", output_of([nvcc, "--version"]))
    # nvcc itself knows where its toolkit lies; a symbolic link or a wrapper on PATH would mislead a guess.
    dry_run = output_of([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
    top = re.search(r"^#\$ TOP=(.*)$", dry_run, re.MULTILINE)
    if version is None or top is None:
        raise BuildError(f"{nvcc} does not answer --version and --dryrun as nvcc does")
    home = Path(top.group(1).strip()).resolve()
    places = [home / "lib64", home / "lib", *sorted(home.glob(f"targets/{platform.machine()}*/lib"))]
    runtime = next(
        (place / "libcudart_static.a" for place in places if (place / "libcudart_static.a").exists()), None
    )
    if runtime is None:
        raise BuildError(f"libcudart_static.a is in none of {', '.join(map(str, places))}")
    archs = tuple(re.findall(r"sm_(\d+[a-z]?)", output_of([nvcc, "--list-gpu-code"])))
    return Toolkit(nvcc, version.group(1), runtime, archs)


def wanted_archs(available: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(architectures to compile, architectures to add PTX for), from TORCH_CUDA_ARCH_LIST or the default list."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not listed:
        binaries = [arch for arch in DEFAULT_ARCHS if arch in available]
        return (binaries, binaries[-1:]) if binaries else ([available[-1]], [available[-1]])
    for name, value in NAMED_ARCHS.items():
        listed = re.sub(rf"\b{re.escape(name)}\b(\+PTX)?", value, listed)
    binaries, ptx = [], []
    for entry in re.split(r"[\s;,]+", listed):
        match = re.fullmatch(r"(\d+)\.(\d[a-z]?)(\+PTX)?", entry)
        if match is None:
            accepted = "numbers such as 8.0, 9.0a or 12.0+PTX, or " + ", ".join(NAMED_ARCHS)
            raise BuildError(f"TORCH_CUDA_ARCH_LIST has {entry!r}; accepted are {accepted}")
        arch = match.group(1) + match.group(2)
        if (
            arch not in available
        ):  # lists are written for a family of machines: an old entry is no reason to stop
            print(f"nanwatch: this nvcc cannot compile for sm_{arch}; left out", file=sys.stderr)
            continue
        binaries.append(arch)
        if match.group(3):
            ptx.append(arch)
    if not binaries:
        raise BuildError(f"TORCH_CUDA_ARCH_LIST={listed!r} names none of sm_{', sm_'.join(available)}")
    return binaries, ptx


@dataclass(frozen=True)
class CudaPart:
    """What the CUDA part adds to the link, and what is known of it afterwards."""

    objects: list[str]
    link: list[str]
    version: str
    archs: str


def compile_cuda(source: Path, folder: Path, toolkit: Toolkit, targets: list[str], jobs: int) -> str:
    """The object file of one CUDA source; BuildError if nvcc cannot make it."""
    out = folder / f"{source.stem}.o"
    command = [toolkit.nvcc, "-c", str(source), "-o", str(out), "-O3", "-std=c++17", f"--threads={jobs}"]
    # Compressed, eight architectures are 3 MB in place of 9.
    command += [
        f"-I{CSRC.name}",
        "-Xcompiler=-fPIC,-Wall,-Wextra,-fvisibility=hidden",
        "-Xfatbin=-compress-all",
        *targets,
    ]
    inputs = [ROOT / source, *CSRC.rglob("*.h")]
    recipe = out.with_suffix(".command")
    # Eight architectures take half a minute on two cores: not again for a change in a C++ file.
    if not (
        out.exists()
        and recipe.exists()
        and recipe.read_text() == shlex.join(command)
        and max(path.stat().st_mtime for path in inputs) < out.stat().st_mtime
    ):
        folder.mkdir(parents=True, exist_ok=True)
        print(shlex.join(command), flush=True)
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise BuildError(f"nvcc {toolkit.version} could not compile {source}; its message is above")
        recipe.write_text(shlex.join(command))
    return str(out)


def build_cuda(folder: Path, jobs: int) -> CudaPart:
    """Compiles the torch-free CUDA sources with nvcc alone, also where torch has no CUDA; BuildError if it cannot."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the CUDA part is built on Linux only, this is {sys.platform}")
    sources = sources_with(".cu")
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)")
    toolkit = read_toolkit(nvcc)
    binaries, ptx = wanted_archs(toolkit.archs)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in binaries]
    targets += [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in ptx]
    objects = [compile_cuda(source, folder, toolkit, targets, jobs) for source in sources]
    # Hidden, or a libcudart of another version that torch brings would be bound in place of this one.
    link = [str(toolkit.runtime), f"-Wl,--exclude-libs,{toolkit.runtime.name}", "-ldl", "-lrt", "-lpthread"]
    archs = " ".join([f"sm_{arch}" for arch in binaries] + [f"compute_{arch}" for arch in ptx])
    return CudaPart(objects, link, toolkit.version, archs)


# C++ -------------------------------------------------------------------------------------------------------


def check_compiler() -> str:
    """First line of `$CXX --version`; BuildError names the usual reasons before a thousand lines of log do."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise BuildError(
            f"there is no C++ compiler: {compiler[0]!r} was not found (set CXX, or install g++ or clang++)"
        )
    try:
        subprocess.run(
            [*compiler, "-x", "c++", "-fsyntax-only", "-"],
            input=b"int main() {}",
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"there is no working C++ compiler: {compiler[0]!r} cannot compile an empty program"
        ) from error
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError(
            "the Python headers are missing: install python3-dev (Debian) or python3-devel (Fedora)"
        )
    return output_of([*compiler, "--version"]).splitlines()[0]


def openmp_link() -> list[str]:
    """The libgomp that torch itself has loaded. A second copy would bring a second, unrelated pool of threads."""
    maps = Path("/proc/self/maps")
    # Five fields, then the path, which may hold spaces.
    fields = [line.split(maxsplit=5) for line in maps.read_text().splitlines()] if maps.exists() else []
    loaded = (line[5] for line in fields if len(line) == 6 and re.search(r"/libgomp[^/]*\.so[^/]*$", line[5]))
    return [next(loaded, "-fopenmp")]


def parallel_jobs() -> int:
    """How many compilers may run at once: MAX_JOBS, or every CPU where it is no number, as PyTorch reads it."""
    value = os.environ.get("MAX_JOBS", "").strip()
    every = os.cpu_count() or 1
    if value.isdecimal():
        return int(value)
    if value:
        print(
            f"nanwatch: MAX_JOBS={value!r} is not a number such as 4 and is not used; compiling with {every} jobs",
            file=sys.stderr,
        )
    return every


class BuildNativePart(build_ext):
    """Builds nanwatch._C with PyTorch's own builder, or leaves the reason why it could not."""

    failed = ""

    def finalize_options(self) -> None:
        super().finalize_options()
        # An editable install would compile in a temporary folder, from scratch every time; this one it shares with
        # `build_ext --inplace`.
        if self.editable_mode or self.inplace:
            self.build_temp = str(ROOT / "build" / f"temp-{sys.implementation.cache_tag}")

    def run(self) -> None:
        for name in ("NANWATCH_REQUIRE_EXT", "FORCE_CUDA", "FORCE_CPU"):
            switched_on(name)  # a misspelt value ends the build here, before anything that may never read it
        facts: dict[str, str] = {"python": platform.python_version()}
        module = Path(self.get_ext_fullpath("nanwatch._C"))
        try:
            self.build(facts)
        except (Exception, SystemExit) as error:
            # What PyTorch's builder raises is not one family: CalledProcessError, RuntimeError, distutils errors.
            text = str(error).strip() or type(error).__name__
            facts["failure"] = (
                text
                if isinstance(error, BuildError)
                else f"{text[:400]} (pip -v shows the compiler's own message)"
            )
            if switched_on("NANWATCH_REQUIRE_EXT") or switched_on("FORCE_CUDA"):
                raise SystemExit(
                    f"nanwatch: the compiled part is required, and {facts['failure']}"
                ) from error
            self.failed = facts["failure"]
            self.extensions = []
            module.unlink(missing_ok=True)  # of an earlier build, and no longer of this source
        module.parent.mkdir(parents=True, exist_ok=True)
        module.with_name("_build.json").write_text(json.dumps(facts, indent=2) + "\n")
        self.speak(facts)

    def build(self, facts: dict[str, str]) -> None:
        if switched_on("FORCE_CUDA") and switched_on("FORCE_CPU"):
            raise BuildError("FORCE_CUDA=1 and FORCE_CPU=1 exclude each other; set one of them")
        try:
            import torch
            from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
        except ImportError as error:
            raise BuildError(
                f"torch cannot be imported at build time ({error}); install it first, then build with "
                "--no-build-isolation, which lets the build see it"
            ) from error
        facts["torch"] = str(torch.__version__)
        facts["compiler"] = check_compiler()
        cuda = self.cuda_part(facts)
        # torch's headers as system headers: -Wextra speaks of our code alone.
        flags = ["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]
        flags += [f"-isystem{path}" for path in include_paths()]
        extension = CppExtension(
            "nanwatch._C",
            [str(path) for path in sources_with(".cpp")],
            include_dirs=[str(CSRC)],
            extra_compile_args={"cxx": flags},
            define_macros=[("NANWATCH_CUDA", "1")] if cuda else [],
            extra_objects=cuda.objects if cuda else [],
            extra_link_args=(cuda.link if cuda else []) + openmp_link(),
        )
        self.distribution.ext_modules = [extension]
        # Delegated, not inherited: torch takes seconds to import, and most runs of this file only ask for metadata.
        command = BuildExtension(self.distribution)
        for option in ("build_lib", "build_temp", "inplace", "editable_mode", "debug"):
            setattr(command, option, getattr(self, option))
        command.ensure_finalized()
        command.run()

    def cuda_part(self, facts: dict[str, str]) -> CudaPart | None:
        if switched_on("FORCE_CPU"):
            facts["cuda_reason"] = "built with FORCE_CPU=1"
            return None
        try:
            cuda = build_cuda(Path(self.build_temp).resolve(), parallel_jobs())
        except BuildError as problem:
            broken = find_nvcc() is not None  # a machine without nvcc is an ordinary machine
            if switched_on("FORCE_CUDA") or (broken and switched_on("NANWATCH_REQUIRE_EXT")):
                raise
            facts["cuda_reason"] = str(problem)
            return None
        facts["cuda"], facts["cuda_archs"] = cuda.version, cuda.archs
        return cuda

    def speak(self, facts: dict[str, str]) -> None:
        lines = []
        if "failure" in facts:
            lines = [
                "nanwatch is installed WITHOUT its compiled part: same answers, but each takes 10 to 100 times longer.",
                f"Reason: {facts['failure']}",
                f"To get it: cure the reason, then run  {RETRY}",
                "`python -m nanwatch` shows this again; NANWATCH_REQUIRE_EXT=1 makes it an error.",
            ]
        elif "cuda_reason" in facts and find_nvcc() is not None and not switched_on("FORCE_CPU"):
            lines = [
                "nanwatch is built without its CUDA part: tensors on a GPU go through PyTorch's own operations.",
                f"Reason: {facts['cuda_reason']}",
                f"To get it: cure the reason, then run  FORCE_CUDA=1 {RETRY}",
            ]
        if lines:
            bar = "*" * 100
            print("\n".join(["", bar, *lines, bar, ""]), file=sys.stderr, flush=True)


class BuildWheel(bdist_wheel):
    """A wheel that ended up without the compiled part is a pure one, and its file name says so."""

    def run(self) -> None:
        self.run_command("build_ext")
        if self.get_finalized_command("build_ext").failed:
            self.root_is_pure = True
            self.distribution.ext_modules = []
        super().run()


setup(
    # The builder takes its own list; this one tells setuptools that there is a binary, and an sdist what it needs.
    ext_modules=[
        Extension(
            "nanwatch._C",
            sources=sorted(str(path.relative_to(ROOT)) for path in CSRC.rglob("*.cpp")),
            depends=sorted(
                str(path.relative_to(ROOT)) for path in CSRC.rglob("*") if path.suffix in (".h", ".cu")
            ),
        )
    ],
    cmdclass={"build_ext": BuildNativePart, "bdist_wheel": BuildWheel},
)
