"""Values that code under test leaves behind, also from a child process, and where no put-back reaches them."""

from __future__ import annotations

import json
import mmap
from typing import Any

_SIZE = 1 << 16


class Spy:
    """List of values in memory that forked processes share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)

    def add(self, value: Any = None) -> None:
        """Append a value that JSON knows."""
        line = json.dumps(value).encode() + b"\n"
        self._memory[(end := self._end()) : end + len(line)] = line

    def __deepcopy__(self, _: Any) -> Spy:
        copied = Spy()
        for value in self.values:
            copied.add(value)
        return copied

    @property
    def values(self) -> list[Any]:
        """All values so far."""
        return [json.loads(line) for line in self._memory[: self._end()].splitlines()]

    def _end(self) -> int:
        return self._memory.find(b"\0")
