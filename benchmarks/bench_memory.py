"""Cost of watching in memory: the peak of training steps of the models of bench_step.py, watched and not.

    python benchmarks/bench_memory.py [--only gpt-2] [--blocks apart together] [--rounds 3]

Each run is a process of its own, plain and watched in turn: a process that had both would keep the larger peak. The
peak is what the system counts (resident size); the heap is what is in use of it after the last step, by mallinfo2.
The difference of medians counts. Times do not matter here, so the machine may be busy.

`together` is glibc as it comes: where the blocks of the heap lie, and so how much of it lies idle, is another matter in
each run, and peaks of the very same program differ by 4 % and more. `apart` has each block of 64 KiB or more mapped by
itself, so that the peak is what is in use and repeats to 0.1 %.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from _steps import cases
from _timing import table

import nanwatch

STEPS = 3
BLOCKS = {"apart": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}, "together": {}}


class _Mallinfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    _fields_ = [(name, ctypes.c_size_t) for name in (*_names, "keepcost")]


def _training(name: str) -> None:
    """The process of one run: prints its peak and its heap in bytes."""
    model_name, watched = name.rsplit(":", 1)
    case = next(case for case in cases() if case.name == model_name)
    step_name = next(name for name in case.steps if name.startswith("training"))
    torch.manual_seed(0)
    # One thread: with more, what each of them keeps for itself varies from run to run.
    torch.set_num_threads(1)
    model = case.build()
    step = case.steps[step_name](model)
    watch = nanwatch.watch(model) if watched == "watched" else None
    for _ in range(STEPS):
        step()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    # Not getrusage's, which begins with the size of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
    assert watch is None or len(watch.frames) > 0
    print(json.dumps({"peak": peak, "heap": info.uordblks + info.hblkhd}))


def _run(model: str, how: str, environment: dict[str, str]) -> dict[str, int]:
    command, variables = [sys.executable, __file__, "--run", f"{model}:{how}"], {**os.environ, **environment}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    sizes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=[*BLOCKS], help="default both")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        _training(options.run)
        return
    rows = []
    wanted = [case.name for case in cases() if options.only.lower() in case.name.lower()]
    for model, blocks in itertools.product(wanted, options.blocks):
        runs: dict[str, list[dict[str, int]]] = {"plain": [], "watched": []}
        for _ in range(options.rounds):
            for how, sizes in runs.items():
                sizes.append(_run(model, how, BLOCKS[blocks]))
        cells = [model, blocks]
        for key in ("peak", "heap"):
            plain, watched = (statistics.median(size[key] for size in runs[how]) for how in runs)
            added, scatter = watched - plain, max(size[key] for size in runs["plain"]) / plain - 1
            cells += [
                f"{plain / 2**20:,.0f}",
                f"{added / 2**20:+.2f}",
                f"{added / plain:+.2%}",
                f"{scatter:.2%}",
            ]
        rows.append(cells)
        print(*cells, file=sys.stderr, flush=True)
    headings = [
        f"{key} {what}" for key in ("peak", "heap") for what in ("MiB", "added", "watched", "scatter")
    ]
    print(table(["model", "blocks", *headings], rows))


if __name__ == "__main__":
    main()
