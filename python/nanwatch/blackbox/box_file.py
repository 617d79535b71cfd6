"""Reader of the file that csrc/blackbox/ writes: its sections as arrays, its texts, its frames.

The first page says where each section lies and which fields its items have. A file may be read while it is written:
counts are read before and after, and items that were overwritten meanwhile are left out. Nothing in a file is executed,
and a file that was damaged gives a ValueError or what can be read of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..util.reading import check_regular

MAGIC = b"nanwatch black box 1\n"
SUFFIX = ".blackbox"
_PAGE = 4096
_MOST_BYTES = 1 << 30
_KINDS = ("u1", "u2", "u4", "u8", "i4", "i8", "f8")
_FILLER = 255
_HEAD = 8  # bytes before a name: its kind, and its length from the fifth on
_NEEDED = {
    "state": "pid begun begun_ticks time ticks calls facts notes names frames latest samples sample_ticks"
    " step_ticks gradient_ticks gradient_batch gradient_module gradient_part signal signal_code signal_ticks"
    " signal_address signal_thread exit exit_status killed_by exit_ticks memory",
    "threads": "id depth",
    "stacks": "begun batch module",
    "calls": "begun ended batch module raised",
    "frame": "batch module rows phase recomputed sizes",
    "row": "abs_min abs_max label dtype role note isfinite dims pending",
    **dict.fromkeys(("facts", "notes", "names", "frames", "samples"), ""),
}

Items = np.ndarray[Any, np.dtype[Any]]


class _Section(NamedTuple):
    at: int
    length: int
    item: np.dtype[Any]


class BoxFrame(NamedTuple):
    """Frame as the file has it: its head, its rows, and the sizes of the shapes of all rows."""

    head: Any
    rows: Items
    sizes: list[int]


class BoxFile:
    """The file at one moment.

    `state` has its fields by name, `calls` are the latest items, oldest first, `threads` and `stacks` the places of
    threads. Raises ValueError, which names the file, for one that is no black box, OSError where it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._read()
        except ValueError as error:
            raise ValueError(f"{self.path} {error}") from error

    def _read(self) -> None:
        check_regular(self.path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MOST_BYTES:
                raise ValueError(f"has {size:,} bytes, and a black box at most {_MOST_BYTES:,}")
            self._data = file.read(size)
            self._sections = _sections(self._data[:_PAGE], len(self._data))
            before = self._items("state")[0]
            # Counts that have grown meanwhile say which items were overwritten during the read.
            file.seek(self._sections["state"].at)
            after = np.frombuffer(file.read(before.dtype.itemsize), before.dtype)
        self.state: dict[str, int] = {name: int(before[name]) for name in before.dtype.names or ()}
        self._after = {name: int(after[0][name]) if len(after) else self.state[name] for name in self.state}
        self.threads = self._items("threads")
        stacks = self._items("stacks")
        self.stacks = np.array_split(stacks, len(self.threads)) if len(self.threads) else []
        self.calls = self._latest("calls")
        self._names = list(self._each_name())

    def write_state(self, name: str, value: int) -> None:
        """Write a field of the state into the file, as only the parent of an ended process may."""
        section = self._sections["state"]
        kind, at = dict(section.item.fields or {})[name][:2]
        with open(self.path, "r+b") as file:
            file.seek(section.at + at)
            file.write(np.array(value, kind).tobytes())

    def _items(self, name: str) -> Items:
        section = self._sections[name]
        return np.frombuffer(self._data, section.item, section.length, section.at)

    def _latest(self, name: str) -> Items:
        """Return the items of a ring that are whole, oldest first."""
        ring = self._items(name)
        end = self.state[name]
        # The oldest may be half overwritten by one that was never counted.
        begin = max(0, self._after[name] - len(ring) + 1)
        first = max(min(begin, end), end - len(ring))
        return ring[[number % len(ring) for number in range(first, end)]]

    def _bytes(self, name: str) -> bytes:
        section = self._sections[name]
        return self._data[section.at : section.at + min(self.state[name], section.length)]

    def text(self, name: str) -> str:
        """Return the text of the section "facts" or "notes"."""
        return self._bytes(name).decode("utf-8", "replace")

    @property
    def sample(self) -> str:
        """Return where Python was when it was last asked."""
        section, count = self._sections["samples"], self.state["samples"]
        if not count or section.length < 2:
            return ""
        begin = section.at + (count - 1) % 2 * section.item.itemsize
        return self._data[begin : begin + section.item.itemsize].split(b"\0")[0].decode("utf-8", "replace")

    def _each_name(self) -> Iterator[str]:
        data, at = self._bytes("names"), 0
        while at + _HEAD <= len(data):
            end = at + _HEAD + int.from_bytes(data[at + 4 : at + _HEAD], "little")
            if end > len(data):
                return
            yield data[at + _HEAD : end].decode("utf-8", "replace")
            at = end

    def name(self, number: int) -> str:
        """Return the text of this number, "" where there is none."""
        return self._names[number] if 0 <= number < len(self._names) else ""

    def frames(self, most: int) -> list[BoxFrame]:
        """Return the latest frames, at most so many, oldest first."""
        section, end = self._sections["frames"], self.state["frames"]
        ring = max(1, section.length)
        head_type, row_type = self._sections["frame"].item, self._sections["row"].item
        # A sixteenth of the ring, which no frame exceeds, may be being overwritten.
        least = max(0, self._after["frames"] - section.length + section.length // 16)

        def data_at(position: int, size: int) -> bytes:
            begin = section.at + position % ring
            return self._data[begin : min(begin + size, section.at + section.length)]

        frames: list[BoxFrame] = []
        while end > least and len(frames) < most:
            size = int.from_bytes(data_at(end - 8, 8), "little")
            if not 8 <= size <= end - least:
                break
            end -= size
            data = data_at(end, size)
            if size < head_type.itemsize:
                continue  # fills the ring to its end
            if len(data) < size:
                break
            head = np.frombuffer(data, head_type, 1)[0]
            if head["phase"] == _FILLER:
                continue
            num_rows, num_sizes = int(head["rows"]), int(head["sizes"])
            at = head_type.itemsize + num_rows * row_type.itemsize
            if at + num_sizes * 8 + 8 != size:
                break
            rows = np.frombuffer(data, row_type, num_rows, head_type.itemsize)
            frames.append(BoxFrame(head, rows, np.frombuffer(data, "<i8", num_sizes, at).tolist()))
        return frames[::-1]


def _sections(page: bytes, size: int) -> dict[str, _Section]:
    """Return the sections that the first page describes."""
    if not page.startswith(MAGIC):
        raise ValueError("is no black box of this version: its first line is another")
    sections: dict[str, _Section] = {}
    for line in page[len(MAGIC) :].partition(b"\0")[0].decode("ascii", "replace").splitlines():
        name, *words = line.split(" ")
        try:
            at, count, width, *fields = words
            section = _Section(int(at), int(count), _item(int(width), fields))
        except (ValueError, TypeError) as error:
            raise ValueError(f"is a damaged black box: its first page has the line {line[:80]!r}") from error
        if min(section[:2]) < 0 or section.at + section.length * section.item.itemsize > size:
            raise ValueError(f"is a damaged or shortened black box: its section {name[:20]!r} ends after it")
        sections[name] = section
    for name, needed in _NEEDED.items():
        known = sections.get(name)
        if known is None or not {*needed.split()} <= {*(known.item.names or ())}:
            raise ValueError(
                f"is damaged, or of another nanwatch: its first page lacks the section {name!r} or fields of it"
            )
    if sections["state"].length < 1:
        raise ValueError("is a damaged black box: its section 'state' is empty")
    return sections


def _item(width: int, fields: list[str]) -> np.dtype[Any]:
    """Return the dtype of an item, from fields such as `module:u4:16`."""
    if not 0 < width <= _PAGE:
        raise ValueError(width)
    if not fields:
        return np.dtype((np.void, width)) if width > 1 else np.dtype("u1")
    names, kinds, offsets = zip(*(field.split(":") for field in fields), strict=True)
    if not {*kinds} <= {*_KINDS}:
        raise ValueError(kinds)
    return np.dtype(
        {
            "names": list(names),
            "formats": [f"<{kind}" for kind in kinds],
            "offsets": [int(offset) for offset in offsets],
            "itemsize": width,
        }
    )
