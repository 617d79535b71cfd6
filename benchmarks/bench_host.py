"""Where the host's time goes in a decoded token, watched beside unwatched: samples by library and by function.

    python benchmarks/bench_host.py [--tokens N]     a 1B Llama on a GPU, an 8x256 one on a CPU

The two take turns, and a timer samples the main thread. A number is ms a token; "more" is what the watch adds. nm names
the functions.
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import re
import subprocess
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

import bench_gpu
import torch
from _timing import table

PERIOD_NS = 100_000
MOST = 1 << 20


@cache
def functions(path: str) -> tuple[list[int], list[str]]:
    """Return the addresses of the functions in a library's file, sorted, and their names."""
    names = {}
    for flag in ("-C", "-DC"):  # of the library's own table, where it has one, and of what it exports
        text = subprocess.run(["nm", flag, "--defined-only", path], capture_output=True, text=True).stdout
        names.update({int(m[1], 16): m[2] for m in re.finditer(r"^(\w+) [tTwWi] (.*)$", text, re.MULTILINE)})
    return sorted(names), [names[address] for address in sorted(names)]


def place_of(address: int, pieces: list[tuple[int, int, int, str]]) -> tuple[str, str]:
    """Return the library and the function of an instruction; pieces: start, end, place of the file's start, path."""
    for start, end, base, path in pieces:
        if start <= address < end:
            addresses, names = functions(path)
            index = bisect.bisect_right(addresses, address - base) - 1
            return Path(path).name, names[index][:70] if index >= 0 else ""
    return "(made at run time)", ""


def code_of_process() -> list[tuple[int, int, int, str]]:
    pieces = []
    lines = Path("/proc/self/maps").read_text()
    for m in re.finditer(r"^(\w+)-(\w+) ..x. (\w+) \S+ \d+ +(/.*)$", lines, re.MULTILINE):
        start, end, offset = (int(number, 16) for number in m.groups()[:3])
        pieces.append((start, end, start - offset, m[4]))
    return pieces


def sample(tokens: int) -> dict[str, Counter[int]]:
    """Decode the tokens in turn, plain and watched. Return each way's samples by address."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).with_name("host_sampler.cpp"), str(Path(folder, "host_sampler.so"))
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", str(source), "-o", library], check=True)
        sampler = ctypes.CDLL(library)
    on_gpu = torch.cuda.is_available()
    model = bench_gpu.llama(rehearse=False) if on_gpu else bench_gpu.llama_of(256, 704, 8, 8, 1000)
    steps = bench_gpu.watched_steps(model.eval(), lambda m: bench_gpu.decode(m, m), ("watch",))
    counts, seconds = {way: Counter[int]() for way in steps}, Counter[str]()
    addresses = (ctypes.c_uint64 * MOST)()
    for position in range(-10, tokens):
        for way, step in steps.items():
            bench_gpu.wait()
            if sampler.sampler_start(PERIOD_NS) != 0:
                raise SystemExit(
                    "bench_host.py: this system gives no timer for a thread: nothing was sampled"
                )
            begun = time.perf_counter()
            step()
            spent = time.perf_counter() - begun
            count = sampler.sampler_stop(addresses, MOST)
            if position >= 0:
                seconds[way] += spent
                counts[way].update(addresses[:count])
    print({way: f"{spent / tokens * 1e3:.3f} ms a token" for way, spent in seconds.items()})
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=300)
    tokens = parser.parse_args().tokens
    counts, pieces = sample(tokens), code_of_process()
    places = {address: place_of(address, pieces) for address in {*counts["plain"], *counts["watch"]}}
    for depth, name in ((1, "library"), (2, "function")):
        plain, watched = Counter[str](), Counter[str]()
        for sums, way in ((plain, "plain"), (watched, "watch")):
            for address, count in counts[way].items():
                sums[" ".join(places[address][:depth])] += count
        top = sorted({*plain, *watched}, key=lambda key: -abs(watched[key] - plain[key]))[: 15 * depth]
        numbers = {key: (plain[key], watched[key], watched[key] - plain[key]) for key in top}
        scale = PERIOD_NS * 1e-6 / tokens
        rows = [(key, *(f"{number * scale:.4f}" for number in numbers[key])) for key in top]
        print(table((name, "plain", "watched", "more"), rows))


if __name__ == "__main__":
    main()
