"""Bandwidth of `nanwatch.scan` beside a plain read of the same file, in one process, and its peak memory.

    python benchmarks/bench_scan.py [--gib 1] [--tensor-mib 64] [--rounds 9] [--folder /tmp] [--cold]

The plain read is `pread` into a buffer of 512 KiB and numpy's sum of it, by one thread for each core. The mapped read
sums the same words in a mapping of its own, as a scan has. Plain read, scan, plain read and mapped read take turns. The
ratios are medians over the rounds: of the time that passes and of that of the processor, which holds on a machine that
does something else besides. `--cold` drops the file from the page cache before each.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import save_file

import nanwatch

_CHUNK = 1 << 19


def _plain(path: Path, threads: int, *, is_mapped: bool = False) -> None:
    size = path.stat().st_size
    mapping = np.memmap(path, np.uint64, "r", shape=(size // 8,)) if is_mapped else None

    def read(part: int) -> None:
        words = np.empty(_CHUNK // 8, np.uint64)
        with path.open("rb") as file:
            for at in range(size * part // threads, size * (part + 1) // threads, _CHUNK):
                if mapping is None:
                    os.preadv(file.fileno(), [words], at)
                else:
                    words = mapping[at // 8 : (at + _CHUNK) // 8]
                words.sum()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def _timed(path: Path, read: Callable[[], object], *, cold: bool) -> tuple[float, float]:
    """Return the seconds that pass, and those of the processor, of all threads."""
    if cold:
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start, used = time.perf_counter(), time.process_time()
    read()
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    """Print the speeds, their ratio and the peak memory."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensor-mib", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "model.safetensors")
        shape = int(options.tensor_mib * 128), 4096
        count = max(1, int(options.gib * 2**30) // (2 * shape[0] * shape[1]))
        save_file({f"layers.{i}.weight": torch.randn(shape).bfloat16() for i in range(count)}, path)
        size, threads = path.stat().st_size, torch.get_num_threads()
        plain_read = partial(_plain, path, threads)
        mapped_read = partial(_plain, path, threads, is_mapped=True)
        reads = (plain_read, partial(nanwatch.scan, path), plain_read, mapped_read)
        rounds = [[_timed(path, read, cold=options.cold) for read in reads] for _ in range(options.rounds)]
        passed, used, floor, mapped = (
            median(times[base][of] / times[to][of] for times in rounds)
            for base, to, of in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (3, 1, 1))
        )
        plain, own = (size / median(times[of][0] for times in rounds) / 1e9 for of in (0, 1))
        print(
            f"{threads} threads: plain {plain:.1f} GB/s, scan {own:.1f}: {passed:.2f} (floor {floor:.2f}),"
            f" of processor time {used:.2f}, of a mapped read's {mapped:.2f}"
        )
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB, writing the file included")


if __name__ == "__main__":
    main()
