"""The PyTorch headers that a build compiles against: those of the installed torch, or of a published one.

A published torch is a wheel of 0.2 GB without CUDA and 0.9 GB with it, which pip downloads. build/torch-headers keeps
the 9 MB of headers.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from build_steps import ROOT, BuildError, output_of

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
