"""Reader of the file that csrc/blackbox/ writes: its sections as arrays, its texts, its frames.

The first page says where each section lies and which fields its items have. A file may be read while it is written:
counts are read before and after, and items that were overwritten meanwhile are left out. Nothing in a file is executed,
and a file that was damaged gives a ValueError or what can be read of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..util.visible import spell

MAGIC = b"nanwatch black box 2\n"
SUFFIX = ".blackbox"
_PAGE = 4096
_MOST_BYTES = 1 << 30
_HEAD = 8  # bytes before a name: its kind, and its length from the fifth on

Items = np.ndarray[Any, np.dtype[Any]]


class BoxFile:
    """The file at one moment.

    `state` has the fields of the process by name, `calls` the calls that ended, oldest first, `threads` and `stacks`
    the places of threads and the calls under way in them, `names` the texts that a frame or a call has by number.
    Raises ValueError, which names the file, for one that is no black box, OSError where it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{self.path} is no regular file")
        with self.path.open("rb") as file:
            data = file.read(_MOST_BYTES)
            if not data.startswith(MAGIC):
                raise ValueError(f"{self.path} is no black box of this version: its first line is another")
            try:
                self._places, self._sections = _sections(data)
                before = self._sections["state"][0]
                # Counts that have grown meanwhile say which items were overwritten during the read.
                file.seek(self._places["state"])
                after = np.frombuffer(file.read(before.dtype.itemsize) or before.tobytes(), before.dtype)[0]
                self.state, self._after = (
                    {name: int(values[name]) for name in before.dtype.names} for values in (before, after)
                )
                self.threads = self._sections["threads"]
                self.stacks = np.array_split(self._sections["stacks"], len(self.threads))
                self.calls = self._latest("calls")
                self.names = _names(self._bytes("names"))
            except Exception as error:  # numpy's, or of a section or a field that is not there
                raise self.damaged(error) from error

    def damaged(self, error: Exception) -> ValueError:
        """Return the error that says that the file cannot be read."""
        return ValueError(
            f"{self.path} is a damaged or shortened black box, or of another nanwatch: {spell(error)}"
        )

    def write_state(self, name: str, value: int) -> None:
        """Write a field of the state into the file, as only the parent of an ended process may."""
        kind, at = dict(self._sections["state"].dtype.fields or {})[name][:2]
        with self.path.open("r+b") as file:
            file.seek(self._places["state"] + at)
            file.write(np.array(value, kind).tobytes())

    def _latest(self, name: str) -> Items:
        """Return the items of a ring that are whole, oldest first."""
        ring, end = self._sections[name], self.state[name]
        # The oldest may be half overwritten by one that was never counted.
        begin = min(max(0, self._after[name] - len(ring) + 1), end)
        return ring[np.arange(max(begin, end - len(ring)), end) % len(ring)]

    def _bytes(self, name: str) -> bytes:
        return self._sections[name][: self.state[name]].tobytes()

    def text(self, name: str) -> str:
        """Return the text of the section "facts" or "notes"."""
        return self._bytes(name).decode("utf-8", "replace")

    @property
    def sample(self) -> str:
        """Return where Python was when it was last asked."""
        samples, count = self._sections["samples"], self.state["samples"]
        text = samples[(count - 1) % len(samples)].tobytes() if count else b""
        return text.partition(b"\0")[0].decode("utf-8", "replace")

    def name(self, number: int) -> str:
        """Return the text of this number, "" where there is none."""
        return self.names[number] if 0 <= number < len(self.names) else ""

    def frames(self, most: int) -> list[Items]:
        """Return the records of the latest frames, at most so many frames, oldest first."""
        records = self._latest("records")
        frames = np.split(records, np.flatnonzero(np.diff(records["frame"])) + 1)
        return [frame for frame in frames[-most:] if len(frame)]


def _sections(data: bytes) -> tuple[dict[str, int], dict[str, Items]]:
    """Return the places of the sections that the first page describes, and their items."""
    places, sections = {}, {}
    for line in data[len(MAGIC) : _PAGE].partition(b"\0")[0].decode("ascii").splitlines():
        name, at, count, width, *fields = line.split(" ")
        places[name] = int(at)
        sections[name] = np.frombuffer(data, _item(int(width), fields), int(count), int(at))
    return places, sections


def _item(width: int, fields: list[str]) -> np.dtype[Any]:
    """Return the dtype of an item, from fields such as `module:u4:16`."""
    if not fields:
        return np.dtype((np.void, width)) if width > 1 else np.dtype("u1")
    names, kinds, offsets = zip(*(field.split(":") for field in fields), strict=True)
    formats, places = [f"<{kind}" for kind in kinds], [int(offset) for offset in offsets]
    return np.dtype({"names": list(names), "formats": formats, "offsets": places, "itemsize": width})


def _names(data: bytes) -> list[str]:
    names, at = [], 0
    while at + _HEAD <= len(data):
        end = at + _HEAD + int.from_bytes(data[at + 4 : at + _HEAD], "little")
        names.append(data[at + _HEAD : end].decode("utf-8", "replace"))
        at = end
    return names
