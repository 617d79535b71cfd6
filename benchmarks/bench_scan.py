"""Bandwidth of `nanwatch.scan` beside a plain read of the same file, in one process, and its peak memory.

    python benchmarks/bench_scan.py [--gib 1] [--tensor-mib 64] [--dtype bfloat16] [--rounds 9] [--folder /tmp]
                                    [--cold]

The plain read is `pread` into a buffer of 512 KiB and numpy's sum of it, by as many threads. Plain read, scan and plain
read take turns. The ratios are medians over the rounds: of the time that passes and of that of the processor, which
holds on a machine that does something else besides. Those of the two plain reads are the floor of what can be told
apart. `--cold` drops the file from the page cache before each. With `--dtype` q8_0, q4_0 or q4_k it is GGUF, with the
scales of normal weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

import nanwatch
from nanwatch.checkpoint.encodings import ENCODINGS

_CHUNK = 1 << 19


def _write(path: Path, gib: float, mib: float) -> None:
    """Write a bfloat16 checkpoint of matrices of so many MiB."""
    rows = int(mib * 128)
    size = rows * 4096 * 2
    count = max(1, int(gib * 2**30) // size)
    header = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [rows, 4096],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):  # alike ones would be read twice, as duplicates
            words = random.standard_normal(rows * 4096, np.float32).view(np.uint32) >> 16
            file.write(words.astype(np.uint16).tobytes())


def _write_gguf(path: Path, gib: float, mib: float, dtype: str) -> None:
    """Write matrices of so many MiB in an encoding of GGUF, of random codes under scales like those of weights."""
    encoding = ENCODINGS[dtype]
    blocks = int(mib * 2**20) // encoding.bytes // 128 * 128
    rows, size = blocks // 128, blocks * encoding.bytes
    count = max(1, int(gib * 2**30) // size)
    head = b"GGUF" + struct.pack("<IQQ", 3, count, 0)
    for i in range(count):
        name = f"blk.{i}.weight".encode()
        shape = (128 * encoding.elements, rows)
        head += struct.pack("<Q", len(name)) + name
        head += struct.pack("<I2QIQ", 2, *shape, encoding.number, i * (size + -size % 32))
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for _ in range(count):
            stored = random.integers(0, 256, (blocks, encoding.bytes), np.uint8)
            for at in range(encoding.place, encoding.place + 2 * encoding.scales, 2):
                scales = np.abs(random.standard_normal((blocks, 32), np.float32)).max(1) / 127
                stored[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(blocks, 2)
            file.write(stored.tobytes() + bytes(-size % 32))


def _plain(path: Path, threads: int) -> None:
    size = path.stat().st_size

    def read(part: int) -> int:
        buffer = np.empty(_CHUNK, np.uint8)
        words, memory, total = buffer.view(np.uint64), memoryview(buffer), 0
        fd = os.open(path, os.O_RDONLY)
        for at in range(size * part // threads, size * (part + 1) // threads, _CHUNK):
            os.preadv(fd, [memory], at)
            total ^= int(words.sum())
        os.close(fd)
        return total

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def _timed(path: Path, read: Callable[[], object], *, cold: bool) -> tuple[float, float]:
    """Return the seconds that pass, and those of the processor, of all threads."""
    if cold:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    start, used = time.perf_counter(), time.process_time()
    read()
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    """Print the speeds, their ratio and the peak memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensor-mib", type=float, default=64.0)
    parser.add_argument("--dtype", choices=("bfloat16", "q8_0", "q4_0", "q4_k"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.dtype == "bfloat16":
            path = Path(folder, "model.safetensors")
            _write(path, options.gib, options.tensor_mib)
        else:
            path = Path(folder, "model.gguf")
            _write_gguf(path, options.gib, options.tensor_mib, options.dtype)
        size = path.stat().st_size
        for threads in (1, len(os.sched_getaffinity(0))):
            rounds = []
            for _ in range(options.rounds):
                rounds.append(
                    [
                        _timed(path, read, cold=options.cold)
                        for read in (
                            lambda: _plain(path, threads),  # noqa: B023
                            lambda: nanwatch.scan(path, threads=threads),  # noqa: B023
                            lambda: _plain(path, threads),  # noqa: B023
                        )
                    ]
                )
            passed, used, floor, floor_used = (
                median(one[0][of] / one[to][of] for one in rounds) for to in (1, 2) for of in (0, 1)
            )
            plain, own = (size / median(one[of][0] for one in rounds) / 1e9 for of in (0, 1))
            print(
                f"{threads} threads: plain {plain:.1f} GB/s, scan {own:.1f}: {passed:.2f} (floor {floor:.2f}),"
                f" of processor time {used:.2f} (floor {floor_used:.2f})",
                flush=True,
            )
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB, writing the file included")


if __name__ == "__main__":
    main()
