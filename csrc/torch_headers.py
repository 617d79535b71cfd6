"""The PyTorch headers that a build compiles against: those of the installed torch, or of a published one.

A published torch is a wheel of half a gigabyte, of which a build needs the 9 MB of headers. pip says where the wheel
is, the range requests below read nothing but the headers, and build/torch-headers keeps them.
"""

from __future__ import annotations

import importlib.util
import io
import json
import runpy
import shutil
import sys
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from build_cuda import ROOT, BuildError, output_of

WHEEL_MINORS = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")  # for which a wheel has a module
HEADERS = ROOT / "build" / "torch-headers"
PARTS = ("torch/include/", "torch/version.py")  # all that is read from a wheel
READ_AHEAD = 4 << 20


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
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError(
            "torch is not there at build time; install it first, then build with --no-build-isolation, which lets "
            "the build see it"
        )
    return torch_in(Path(found.origin).parent)


class RemoteFile(io.RawIOBase):
    """A file behind a URL, of which only the parts that are read are fetched."""

    def __init__(self, url: str) -> None:
        self.url, self.at, self.begin, self.held = url, 0, 0, b""
        self.size = int(self._request("bytes=0-0").headers["Content-Range"].rpartition("/")[2])

    def _request(self, extent: str):
        request = urllib.request.Request(self.url, headers={"Range": extent})
        response = urllib.request.urlopen(request, timeout=120)
        if response.status != 206:
            raise BuildError(f"{self.url} cannot be read in parts (status {response.status})")
        return response

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it."""
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: bytearray | memoryview) -> int:
        """Read at the position, fetching READ_AHEAD bytes where they are not held, and return how many were read."""
        wanted = memoryview(buffer)
        count = max(0, min(len(wanted), self.size - self.at))
        if count and not self.begin <= self.at <= self.at + count <= self.begin + len(self.held):
            last = min(self.size, self.at + max(count, READ_AHEAD)) - 1
            self.begin, self.held = self.at, self._request(f"bytes={self.at}-{last}").read()
        offset = self.at - self.begin
        wanted[:count] = self.held[offset : offset + count]
        self.at += count
        return count


def published_torch(minor: str) -> Torch:
    """Return the newest published torch of a minor version such as "2.12", fetching its headers once."""
    folder = HEADERS / minor
    if not (folder / "torch" / "version.py").exists():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _unpack(_wheel_url(minor), folder)
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise BuildError(f"the headers of torch {minor} could not be fetched: {error}") from error
    return torch_in(folder / "torch")


def _wheel_url(minor: str) -> str:
    """Return where pip would take the wheel from, by its configuration of indexes and mirrors."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
    ]
    report = json.loads(
        output_of([*command, "--only-binary=:all:", "--report=-", f"torch=={minor}.*"], stderr=False)
    )
    return str(report["install"][0]["download_info"]["url"])


def _unpack(url: str, folder: Path) -> None:
    local = url.startswith("file:")
    file = urllib.request.urlopen(url) if local else io.BufferedReader(RemoteFile(url), 1 << 16)
    with file, zipfile.ZipFile(file) as wheel:
        # In the order in which they lie in the file: each byte is then fetched once.
        members = sorted(wheel.infolist(), key=lambda member: member.header_offset)
        chosen = [member for member in members if member.filename.startswith(PARTS)]
        # version.py last: it is what says that all is there.
        chosen.sort(key=lambda member: member.filename == PARTS[1])
        for member in chosen:
            wheel.extract(member, folder)
