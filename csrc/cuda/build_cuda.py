"""Compiles the CUDA sources of this folder with nvcc alone, without PyTorch's headers. setup.py calls `build_cuda`.

TORCH_CUDA_ARCH_LIST and CUDA_HOME choose the architectures and the toolkit, as setup.py says.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from build_units import CSRC, BuildError, Ninja, output_of

# From Turing to Blackwell: one binary for every generation PyTorch still builds for, and PTX for what comes after.
DEFAULT_ARCHS = ("75", "80", "86", "89", "90", "100", "120")


def find_nvcc() -> str | None:
    """Return the nvcc of CUDA_HOME or CUDA_PATH, else the one on PATH, else the one in /usr/local/cuda."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (nvcc := shutil.which("nvcc", path=str(Path(home, "bin")))):
            return nvcc
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def read_toolkit(nvcc: str) -> tuple[str, Path, tuple[str, ...]]:
    """Return the version of this nvcc, its static runtime library, and what it can compile for: "75", "90a", …

    BuildError where it does not answer as nvcc does.
    """
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
    return version.group(1), runtime, archs


def present_archs() -> set[str]:
    """Return the architectures of the GPUs of this machine, by the driver; empty where there is none."""
    with contextlib.suppress(BuildError):
        text = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
        return {major + minor for major, minor in re.findall(r"^(\d+)\.(\d)\s*$", text, re.MULTILINE)}
    return set()


def wanted_archs(available: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return what to compile for and what to add PTX for, by TORCH_CUDA_ARCH_LIST, the GPUs, or the default."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not listed:
        binaries = sorted(present_archs(), key=int)
        if not binaries or not set(binaries) <= set(available):
            binaries = [arch for arch in DEFAULT_ARCHS if arch in available] or [available[-1]]
        return binaries, binaries[-1:]
    binaries, ptx = [], []
    for entry in re.split(r"[\s;,]+", listed):
        match = re.fullmatch(r"(\d+)\.(\d[a-z]?)(\+PTX)?", entry)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST has {entry!r}; accepted are numbers such as 8.0, 9.0a or 12.0+PTX"
            )
        arch = match.group(1) + match.group(2)
        if arch not in available:  # a list for a family of machines: an old entry is no reason to stop
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
    """Objects and flags that the CUDA part adds to the link, and its version and architectures."""

    objects: list[Path]
    link: list[str]
    version: str
    archs: str


def build_cuda(ninja: Ninja) -> CudaPart:
    """Compile the torch-free CUDA sources with nvcc alone, also where torch has no CUDA; BuildError if it cannot."""
    if (nvcc := find_nvcc()) is None:
        raise BuildError("nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)")
    version, runtime, available = read_toolkit(nvcc)
    binaries, ptx = wanted_archs(available)
    # Compressed, eight architectures are 3 MB in place of 9.
    flags = ["-O3", "-std=c++17", f"--threads={ninja.jobs}", f"-I{CSRC}", "-Xfatbin=-compress-all"]
    flags += ["-Xcompiler=-fPIC,-Wall,-Wextra,-fvisibility=hidden"]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in binaries]
    flags += [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in ptx]
    ninja.compiler_rule("nvcc", [nvcc])
    objects = [
        ninja.edge("nvcc", [source], ninja.folder / "cuda" / f"{source.stem}.o", flags)
        for source in sorted(CSRC.rglob("*.cu"))
    ]
    ninja.run(f"the CUDA part ({len(binaries) + len(ptx)} targets, nvcc {version})", objects)
    # Hidden, or a libcudart of another version that torch brings would be bound in place of this one.
    link = [str(runtime), f"-Wl,--exclude-libs,{runtime.name}", "-ldl", "-lrt", "-lpthread"]
    archs = " ".join([f"sm_{arch}" for arch in binaries] + [f"compute_{arch}" for arch in ptx])
    return CudaPart(objects, link, version, archs)
