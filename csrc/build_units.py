"""Compiles and links the C++ sources of this folder with ninja, for one PyTorch or for several. setup.py calls it.

PyTorch's headers take a compiler ten seconds, each of these sources two. The sources that include them are therefore
compiled together, a few files in one translation unit: a third of the time, and calls between them are inlined. The
kernels in cpu/ do not include PyTorch. They are compiled once for all versions of it, each file alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

CSRC = Path(__file__).resolve().parent  # where includes begin
ROOT = CSRC.parent
LOG = ROOT / "build" / "compile.log"


class BuildError(Exception):
    """Why the compiled part, or its CUDA part, cannot be built here, in words for the user."""


def run_step(name: str, command: list[str], failure: str) -> None:
    """Run a command with its output in LOG, and print the name and the time; BuildError(failure) where it fails."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with LOG.open("a+", errors="replace") as log:
        begin = log.seek(0, os.SEEK_END)
        print(shlex.join(command), file=log, flush=True)
        failed = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode != 0
        log.seek(begin)
        errors = [line for line in log if failed and re.search(r"\berror\b", line, re.IGNORECASE)]
    took = "failed after" if failed else "took"
    print(f"nanwatch: {name} {took} {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        print("".join(errors[:10]) + f"nanwatch: all of it is in {LOG}", file=sys.stderr, flush=True)
        raise BuildError(failure)


def output_of(command: list[str], seconds: int = 120) -> str:
    """Return stdout and stderr of a command; BuildError when it cannot run, fails or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"`{shlex.join(command)}` did not run: {error}") from error
    if done.returncode != 0:
        text = (done.stdout + done.stderr).strip()[-400:]
        raise BuildError(f"`{shlex.join(command)}` failed ({done.returncode}): {text}")
    return done.stdout + done.stderr


# Headers of PyTorch: of the installed one, or of a published one, which pip downloads as a wheel of 0.2 GB without CUDA
# and 0.9 GB with it. build/torch-headers keeps the 9 MB of headers.

WHEEL_MINORS = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")  # for which a wheel has a module
HEADERS = ROOT / "build" / "torch-headers"
PARTS = re.compile(r"torch/(include/|version\.py$)")  # all that is taken from a wheel


@dataclass(frozen=True)
class Torch:
    """One version of PyTorch as a compiler sees it."""

    version: str
    cuda: str | None
    include: Path

    @property
    def minor(self) -> str:
        """The part of the version within which torch keeps its binary interface: "2.13"."""
        return ".".join(self.version.split("+")[0].split(".")[:2])

    @property
    def folders(self) -> list[Path]:
        """The folders in which a compiler looks for headers."""
        return [self.include, self.include / "torch" / "csrc" / "api" / "include"]


def torch_in(folder: Path) -> Torch:
    """Return the torch whose package is this folder; BuildError where it has no headers. Nothing is imported."""
    if not (folder / "include" / "torch").is_dir():
        raise BuildError(f"the torch in {folder} has no headers; install one from a wheel: pip install torch")
    facts = runpy.run_path(str(folder / "version.py"))
    return Torch(str(facts["__version__"]), facts.get("cuda"), folder / "include")


def installed_torch() -> Torch:
    """Return the torch that this Python would import; BuildError where there is none."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise BuildError(
            "torch is not there at build time; install it first, then build with --no-build-isolation, which lets "
            "the build see it"
        )
    return torch_in(Path(torch.origin).parent)


def published_torch(minor: str) -> Torch:
    """Return the newest published torch of a minor version such as "2.12", fetching its headers once."""
    folder = HEADERS / minor
    if not (folder / "torch" / "version.py").exists():
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            output_of([*command, "--dest", place, f"torch=={minor}.*"], seconds=1800)
            (wheel,) = Path(place).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                # version.py last: it is what says that all is there.
                parts = sorted(filter(PARTS.match, archive.namelist()), key="torch/version.py".__eq__)
                archive.extractall(folder, parts)
    return torch_in(folder / "torch")


# The units.

# The folders whose sources make up a unit, "" for csrc/ itself. The call of a watched module stays within the first.
UNITS = {"recorder": ("", "blackbox", "device", "recorder"), "operators": ("gradients", "ops")}
KERNELS = "cpu"
# In a unit of their own, and only where they are used: sources that begin with this line.
CUDA_ONLY = re.compile(r"\A(?://.*\n|\s*\n)*#ifdef NANWATCH_CUDA$", re.MULTILINE)

FLAGS = ["-std=c++20", "-O3", "-g0", "-DNDEBUG", "-fPIC", "-fwrapv", "-fopenmp", "-fvisibility=hidden"]
FLAGS += ["-fno-plt", "-Wall", "-Wextra", "-Wsign-compare", f"-I{CSRC}"]
# GCC stops inlining in units above 10,000 instructions, and a unit here has several sources. With the limit raised, a
# watched call takes 4,329 instructions of this module, without it 4,792. Clang has no such limit and ignores the flag.
FLAGS += ["--param=large-unit-insns=400000"]
# Beside a model's own code the first cache is cold, and a watched call pays for each line of code it runs through. -O2
# makes the code a tenth smaller, and -fno-plt saves the stubs' lines. The loops over memory are the kernels'.
UNIT_FLAGS = ["-O2", "-fno-align-jumps", "-fno-align-loops", "-DTORCH_EXTENSION_NAME=_C"]
# The libraries that `import torch` has loaded before the module is. They also bring the one OpenMP that is used: to
# link one more would start a second pool of threads.
TORCH_LIBRARIES = ("c10", "torch_cpu", "torch_python")


def words(variable: str) -> list[str]:
    """Return the arguments in an environment variable such as CXXFLAGS."""
    return shlex.split(os.environ.get(variable, ""))


def compiler() -> list[str]:
    """Return the command of the C++ compiler."""
    return words("CXX") or ["c++"]


def sources() -> dict[str, list[Path]]:
    """Return the C++ sources of each unit: of UNITS, and "cuda". BuildError where a folder belongs to none."""
    units: dict[str, list[Path]] = {name: [] for name in (*UNITS, "cuda")}
    for path in sorted(CSRC.rglob("*.cpp")):
        folder = str(path.parent.relative_to(CSRC)).removeprefix(".")
        if folder == KERNELS:
            continue
        name = next((name for name, folders in UNITS.items() if folder in folders), None)
        if name is None:
            raise BuildError(f"{path.relative_to(ROOT)} belongs to no unit of csrc/build_units.py")
        units["cuda" if CUDA_ONLY.match(path.read_text(encoding="utf-8")) else name].append(path)
    return {name: paths for name, paths in units.items() if paths}


@dataclass
class Ninja:
    """A file of rules for ninja, written in `folder`, and the ways to run it."""

    folder: Path
    jobs: int
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        cache = shutil.which("ccache") if not any("ccache" in word for word in compiler()) else None
        self.lines = [f"builddir = {escaped(self.folder)}"]
        self.lines += ["rule link", f"  command = {shlex.join([*compiler(), *shared()])} $in -o $out $flags"]
        self.compiler_rule("compile", [*filter(None, [cache]), *compiler()])

    def compiler_rule(self, rule: str, command: list[str]) -> None:
        """Add a rule that compiles one source, and again when a header that it includes has changed."""
        self.lines += [f"rule {rule}", "  depfile = $out.d", "  deps = gcc"]
        self.lines += [f"  command = {shlex.join(command)} -MMD -MF $out.d $flags -c $in -o $out"]

    def edge(
        self, rule: str, inputs: list[Path], output: Path, flags: list[str], needs: list[Path] | None = None
    ) -> Path:
        """Add one step and return its output. `needs` must be there before, and is not passed to the command."""
        names = " ".join(map(escaped, inputs)) + " ".join(["", "|", *map(escaped, needs)] if needs else [])
        self.lines += [f"build {escaped(output)}: {rule} {names}", f"  flags = {shlex.join(flags)}"]
        return output

    def run(self, name: str, outputs: list[Path]) -> None:
        """Bring the outputs up to date as one step of this name; BuildError where that fails."""
        file = self.folder / "build.ninja"
        file.write_text("\n".join([*self.lines, ""]), encoding="utf-8")
        ninja = [path] if (path := shutil.which("ninja")) else [sys.executable, "-m", "ninja"]
        command = [*ninja, "-v", "-f", str(file), "-j", str(self.jobs), *map(str, outputs)]
        run_step(name, command, f"{name} could not be built; the compiler's own message is in {LOG}")


def escaped(path: Path) -> str:
    """Return a path as a file of ninja's spells it."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def shared() -> list[str]:
    """Return the flags with which this Python links extension modules, without its compiler."""
    command = shlex.split(sysconfig.get_config_var("LDCXXSHARED") or "c++ -shared")
    return [word for word in command[1:] if word.startswith(("-shared", "-bundle", "-undefined", "dynamic"))]


def written(path: Path, text: str) -> Path:
    """Write a file unless it says that already, and return it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def settings(*flags: str) -> list[str]:
    """Return the flags of every compilation, the user's behind ours."""
    return [*FLAGS, *flags, *words("CPPFLAGS"), *words("CFLAGS"), *words("CXXFLAGS")]


class Compiled:
    """The steps that make the kernels, and from them and from PyTorch's headers one module for each PyTorch."""

    def __init__(self, folder: Path, jobs: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ninja = Ninja(folder, jobs)
        # Stand-ins with the names of PyTorch's, which are not at hand for every version.
        empty = written(folder / "empty.cpp", "")
        self.libraries = [
            self.ninja.edge("link", [empty], path, ["-nostdlib", f"-Wl,-soname,{path.name}"])
            for path in (folder / "libraries" / f"lib{name}.so" for name in TORCH_LIBRARIES)
        ]

    @cached_property
    def kernels(self) -> list[Path]:
        """Return the kernels' objects. The first link adds their steps, behind the longer units."""
        return [
            self.ninja.edge("compile", [path], self.ninja.folder / KERNELS / f"{path.stem}.o", settings())
            for path in sorted((CSRC / KERNELS).glob("*.cpp"))
        ]

    def module(self, torch: Torch, cuda: list[Path] | None, link: list[str]) -> Path:
        """Add the steps of `nanwatch._C` for one PyTorch, with the CUDA part's objects or None; return its file."""
        folder = self.ninja.folder / f"torch-{torch.version}"
        flags = [f"-isystem{path}" for path in torch.folders]
        flags += [f"-I{sysconfig.get_path('include')}", *UNIT_FLAGS]
        flags += ["-DNANWATCH_CUDA=1"] if cuda is not None else []
        objects = []
        for name, paths in sources().items():
            if name != "cuda" or cuda is not None:
                text = "".join(f'#include "{path.relative_to(CSRC)}"\n' for path in paths)
                unit = written(self.ninja.folder / "units" / f"{name}.cpp", text)
                objects.append(self.ninja.edge("compile", [unit], folder / f"{name}.o", settings(*flags)))
        # The module names torch's libraries as needed: its symbols are looked up in them alone.
        names = [f"-l{name}" for name in TORCH_LIBRARIES]
        needed = [f"-L{self.ninja.folder / 'libraries'}", "-Wl,--no-as-needed", *names, "-Wl,--as-needed"]
        flags = [*link, *words("LDFLAGS"), *needed]
        objects += [*self.kernels, *(cuda or [])]
        return self.ninja.edge("link", objects, folder / "_C.so", flags, self.libraries)
