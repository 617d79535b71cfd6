"""Builds the one compiled module, nanwatch._C. Everything static about the package is in pyproject.toml.

A failing build must not take the library away, and must not go unnoticed: the install goes on in pure Python, one
message says what was lost, and nanwatch/_build.json keeps the reason, because pip hides a build's output. The first
use of the fallback and `python -m nanwatch` read it back (see python/nanwatch/numerics/_extension.py).

Environment
    NANWATCH_REQUIRE_EXT=1   a build without the compiled part, or with its CUDA part broken, is an error
    FORCE_CUDA=1             build the CUDA part even where torch has no CUDA; a build without it is an error
    FORCE_CPU=1              leave the CUDA part out even where torch has CUDA
    TORCH_CUDA_ARCH_LIST     GPU architectures, as PyTorch reads it: "8.0;9.0+PTX"; what this nvcc cannot compile
                             for is left out. Default: those of the GPUs of this machine, or where
                             there is none every generation from Turing on
    NANWATCH_TORCH=all       compile for the published versions of PyTorch that a wheel serves in place of the
                             installed one (`make wheel`), or for some of them: "2.12 2.13". pip downloads
                             them for their headers; PyTorch need not be installed
    CUDA_HOME, CXX, MAX_JOBS, CPPFLAGS, CFLAGS, CXXFLAGS, LDFLAGS  as other builds read them

Each step prints one line with its time. The compilers' output goes to build/compile.log. ccache is used where it is
installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools

if (
    int(setuptools.__version__.split(".")[0]) < 77
):  # the first that reads `license = "Apache-2.0"` in pyproject.toml
    raise SystemExit(
        f"nanwatch: setuptools {setuptools.__version__} is too old for this build, which needs 77 or newer. "
        'Run  pip install "setuptools>=77" wheel ninja  first, or build without --no-build-isolation.'
    )

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc" / "cuda"))

from build_cuda import CudaPart, build_cuda, find_nvcc
from build_units import (
    CSRC,
    LOG,
    ROOT,
    WHEEL_MINORS,
    BuildError,
    Compiled,
    Ninja,
    Torch,
    compiler,
    installed_torch,
    output_of,
    published_torch,
)

RETRY = "pip install --no-build-isolation --force-reinstall --no-deps -v ."


def switched_on(name: str) -> bool:
    """True for NAME=1, False for NAME=0, empty or unset; anything else ends the build."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"nanwatch: {name}={value!r} is not understood; set it to 1 (on) or 0 (off).")
    return value == "1"


def check_compiler() -> str:
    """First line of `$CXX --version`; BuildError names the usual reasons before a thousand lines of log do."""
    command = compiler()
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"there is no C++ compiler: {command[0]!r} was not found (set CXX, or install g++ or clang++)"
        )
    try:
        subprocess.run(
            [*command, "-x", "c++", "-fsyntax-only", "-"],
            input=b"int main() {}",
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"there is no working C++ compiler: {command[0]!r} cannot compile an empty program"
        ) from error
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError(
            "the Python headers are missing: install python3-dev (Debian) or python3-devel (Fedora)"
        )
    return output_of([*command, "--version"]).splitlines()[0]


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


def wanted_torches() -> list[Torch]:
    """The versions of PyTorch to compile for: those that NANWATCH_TORCH names, else the installed one."""
    value = os.environ.get("NANWATCH_TORCH", "")
    named = list(WHEEL_MINORS) if value == "all" else value.split()
    for minor in named:
        if re.fullmatch(r"\d+\.\d+", minor) is None:
            raise BuildError(
                f"NANWATCH_TORCH names {minor!r}; accepted are minor versions of PyTorch, such as '2.12 2.13', and "
                '"all" for those of the wheels'
            )
    return [published_torch(minor) for minor in named] or [installed_torch()]


class BuildNativePart(build_ext):
    """Builds nanwatch._C, or leaves the reason why it could not."""

    failed = ""
    cuda_broken = False

    def finalize_options(self) -> None:
        super().finalize_options()
        # An editable install would compile in a temporary folder, from scratch every time; this one it shares with
        # `build_ext --inplace`.
        if self.editable_mode or self.inplace:
            self.build_temp = str(ROOT / "build" / f"temp-{sys.implementation.cache_tag}")

    def run(self) -> None:
        for name in ("NANWATCH_REQUIRE_EXT", "FORCE_CUDA", "FORCE_CPU"):
            switched_on(name)  # a misspelt value ends the build here, before anything that may never read it
        # What Python expects of the module. Python code that expects something else does not load it.
        stub = ROOT / "python" / "nanwatch" / "_C.pyi"
        facts = {"python": platform.python_version(), "stub": hashlib.sha256(stub.read_bytes()).hexdigest()}
        module = Path(self.get_ext_fullpath("nanwatch._C"))
        folder, suffix = module.parent, module.name.removeprefix("_C")
        built: dict[str, Path] = {}
        try:
            built = {name.replace("*", suffix): path for name, path in self.build(facts).items()}
        except Exception as error:
            facts["failure"] = str(error).strip() or type(error).__name__
            if switched_on("NANWATCH_REQUIRE_EXT") or switched_on("FORCE_CUDA"):
                raise SystemExit(
                    f"nanwatch: the compiled part is required, and {facts['failure']}"
                ) from error
            self.failed = facts["failure"]
            self.extensions = []
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"_C*{suffix}"):
            old.unlink()  # of an earlier build, and no longer of this source
        for name, path in built.items():
            shutil.copy(path, folder / name)
        (folder / "_build.json").write_text(json.dumps(facts, indent=2) + "\n")
        self.speak(facts)

    def build(self, facts: dict[str, str]) -> dict[str, Path]:
        """The files to install, by name. "*" in a name stands for this Python's suffix of modules."""
        if switched_on("FORCE_CUDA") and switched_on("FORCE_CPU"):
            raise BuildError("FORCE_CUDA=1 and FORCE_CPU=1 exclude each other; set one of them")
        torches = wanted_torches()
        portable = bool(os.environ.get("NANWATCH_TORCH"))
        facts["torch"] = " ".join(torch.version for torch in torches)
        facts["compiler"] = check_compiler()
        LOG.unlink(missing_ok=True)
        compiled = Compiled(Path(self.build_temp).resolve(), parallel_jobs())
        cuda = self.cuda_part(facts, compiled.ninja, torches[0].cuda is not None)
        objects = cuda.objects if cuda else None
        link = [*(cuda.link if cuda else []), *(["-Wl,-s"] if portable else [])]
        outputs = [compiled.module(torch, objects, link) for torch in torches]
        for torch, output in zip(torches, outputs, strict=True):
            compiled.ninja.run(f"the C++ part for torch {torch.version}", [output])
        names = [f"_C-torch{torch.minor}*" if portable else "_C*" for torch in torches]
        return dict(zip(names, outputs, strict=True))

    def cuda_part(self, facts: dict[str, str], ninja: Ninja, torch_has_cuda: bool) -> CudaPart | None:
        if switched_on("FORCE_CPU"):
            facts["cuda_reason"] = "built with FORCE_CPU=1"
            return None
        if os.environ.get("NANWATCH_TORCH") and not switched_on("FORCE_CUDA"):
            facts["cuda_reason"] = "a wheel brings no CUDA kernels; an install from source compiles them"
            return None
        if not torch_has_cuda and not switched_on("FORCE_CUDA"):
            facts["cuda_reason"] = (
                "built for a torch without CUDA (FORCE_CUDA=1 builds the CUDA part all the same)"
            )
            return None
        try:
            cuda = build_cuda(ninja)
        except BuildError as problem:
            broken = find_nvcc() is not None  # a machine without nvcc is an ordinary machine
            if switched_on("FORCE_CUDA") or (broken and switched_on("NANWATCH_REQUIRE_EXT")):
                raise
            facts["cuda_reason"] = str(problem)
            self.cuda_broken = broken
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
        elif self.cuda_broken:
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
                str(path.relative_to(ROOT)) for path in CSRC.rglob("*") if path.suffix in (".h", ".cu", ".py")
            ),
        )
    ],
    cmdclass={"build_ext": BuildNativePart, "bdist_wheel": BuildWheel},
)
