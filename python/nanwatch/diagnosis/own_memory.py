"""Memory that a forked child shares with other processes, made the child's own: a write ends with the child.

`np.memmap`, `multiprocessing.Value`, `Tensor.share_memory_()` and the semaphores of multiprocessing lie in such memory.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE

_MAP_FIXED = 0x10
# Bytes that are copied. A file that still has its name needs no copy.
_MOST_COPIED = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)


def own_shared_memory() -> None:
    """Let each shared mapping that can be written be private from now on, at its address and with its content.

    What is past 1 GiB can only be read: a write to it ends the process by SIGSEGV.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        lines = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    copied = 0
    for addresses, access, offset, _, inode, *names in lines:
        path = names[0] if names else ""
        # Memory of a device is not to be read.
        is_memory = path.startswith("/") and (
            not path.startswith("/dev/") or path.startswith(("/dev/shm/", "/dev/zero"))
        )
        if not (access.startswith("rw") and access.endswith("s") and is_memory):
            continue
        begin, end = (int(x, 16) for x in addresses.split("-"))
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                if os.fstat(file).st_ino == int(inode):
                    _map(begin, end - begin, MAP_PRIVATE, file, int(offset, 16))
                    continue
            finally:
                os.close(file)
        if copied + end - begin > _MOST_COPIED:
            _libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), PROT_READ)
            continue
        copied += end - begin
        content = ctypes.string_at(begin, end - begin)
        _map(begin, end - begin, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        ctypes.memmove(begin, content, end - begin)


def _map(address: int, size: int, flags: int, file: int, offset: int) -> None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if _libc.mmap(address, size, PROT_READ | PROT_WRITE, flags | _MAP_FIXED, file, offset) != address:
        raise OSError(ctypes.get_errno(), "mmap")
