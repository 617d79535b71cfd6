"""Bandwidth of `nanwatch.scan` beside a plain read of the same file, in one process, and its peak memory.

    python benchmarks/bench_scan.py [--gib 1] [--rounds 5] [--folder /tmp] [--cold]

The plain read is `pread` into a buffer of 512 KiB and numpy's sum of it, by as many threads. The two take turns, and
the ratio is the median over the rounds. `--cold` drops the file from the page cache before each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

import nanwatch

_CHUNK = 1 << 19


def _write(path: Path, gib: float) -> None:
    """Write a bfloat16 checkpoint of matrices of 64 MiB."""
    count, rows = max(1, int(gib * 16)), 8192
    size = rows * 4096 * 2
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


def _timed(path: Path, read: Callable[[], object], *, cold: bool) -> float:
    if cold:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    start = time.perf_counter()
    read()
    return time.perf_counter() - start


def main() -> None:
    """Print the speeds, their ratio and the peak memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "model.safetensors")
        _write(path, options.gib)
        size = path.stat().st_size
        for threads in (1, len(os.sched_getaffinity(0))):
            pairs = []
            for _ in range(options.rounds):
                plain = _timed(path, lambda: _plain(path, threads), cold=options.cold)  # noqa: B023
                own = _timed(path, lambda: nanwatch.scan(path, threads=threads), cold=options.cold)  # noqa: B023
                pairs.append((plain, own))
            plain, own = (median(column) for column in zip(*pairs, strict=True))
            ratio = median(a / b for a, b in pairs)
            print(
                f"{threads} threads: plain {size / plain / 1e9:.1f} GB/s, scan {size / own / 1e9:.1f}: {ratio:.2f}"
            )
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB, writing the file included")


if __name__ == "__main__":
    main()
