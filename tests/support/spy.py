"""Values that code under test leaves behind, also from a child process, and where no put-back reaches them."""

from __future__ import annotations

import ctypes
import json
import mmap
from typing import Any

_SIZE = 1 << 16


class Spy:
    """List of values in memory that forked processes share.

    The memory can be written only inside `add`, as a re-run's child makes all other shared memory its own.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._protect(mmap.PROT_READ)

    def add(self, value: Any = None) -> None:
        """Append a value that JSON knows."""
        line = json.dumps(value).encode() + b"\n"
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory[(end := self._end()) : end + len(line)] = line
        self._protect(mmap.PROT_READ)

    def _protect(self, access: int) -> None:
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(self._address), _SIZE, access) == 0

    def __deepcopy__(self, _: Any) -> Spy:
        copied = Spy()
        for value in self.values:
            copied.add(value)
        return copied

    @property
    def values(self) -> list[Any]:
        return [json.loads(line) for line in self._memory[: self._end()].splitlines()]

    def _end(self) -> int:
        return self._memory.find(b"\0")
