"""Where the host's time goes in a decoded token, watched beside unwatched: samples by library and by function.

    python benchmarks/bench_host.py                  one token of a 1B Llama on a GPU, of an 8x256 one on the CPU
    python benchmarks/bench_host.py --tokens 400 --json host.json

The two take turns, each with samples of its own of the main thread. A number is ms a token; what
stands in "more" is what the watch adds. Functions of nanwatch's compiled part are named by nm, others by the loader.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import ctypes
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_gpu
import torch
from _timing import machine, table, write_json

PERIOD_NS = 100_000
_MOST = 1 << 20


def load_sampler() -> ctypes.CDLL:
    source = Path(__file__).with_name("host_sampler.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "host_sampler.so"))
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", str(source), "-o", library], check=True)
        return ctypes.CDLL(library)


def libraries() -> list[tuple[int, int, int, str]]:
    """Return start, end, start less the offset in the file, and path of each mapped piece of code, sorted."""
    pieces = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, offset, *_ = line.split()
        if "x" in rights:
            start, end = (int(number, 16) for number in place.split("-"))
            path = line.split(maxsplit=5)[5] if len(line.split()) > 5 else "(made at run time)"
            pieces.append((start, end, start - int(offset, 16), path))
    return sorted(pieces)


def functions(path: str) -> tuple[list[int], list[str]]:
    """Return the addresses of the functions in a library's file, sorted, and their names."""
    names = {}
    for flag in ("-C", "-DC"):
        text = subprocess.run(["nm", flag, "--defined-only", path], capture_output=True, text=True).stdout
        names.update({int(m[1], 16): m[2] for m in re.finditer(r"^(\w+) [tTwWi] (.*)$", text, re.MULTILINE)})
    return sorted(names), [names[address] for address in sorted(names)]


class Places:
    """From an address of an instruction to its library and function."""

    def __init__(self) -> None:
        self._pieces = libraries()
        self._starts = [piece[0] for piece in self._pieces]
        self._functions: dict[str, tuple[list[int], list[str]]] = {}

    def of(self, address: int) -> tuple[str, str]:
        index = bisect.bisect_right(self._starts, address) - 1
        start, end, base, path = self._pieces[max(index, 0)]
        if not start <= address < end:
            return "(elsewhere)", ""
        if path not in self._functions:
            self._functions[path] = functions(path) if path.startswith("/") else ([], [])
        addresses, names = self._functions[path]
        place = bisect.bisect_right(addresses, address - base) - 1
        return Path(path).name, names[place][:70] if place >= 0 else ""


def samples(tokens: int) -> tuple[dict[str, collections.Counter[int]], dict[str, float]]:
    """Decode the tokens in turn, plain and watched. Return each way's samples by address, and its seconds."""
    on_gpu = torch.cuda.is_available()
    model = bench_gpu.llama(rehearse=False) if on_gpu else bench_gpu.llama_of(256, 704, 8, 8, 1000)
    steps = bench_gpu.watched_steps(model.eval(), lambda m: bench_gpu.decode(m, m), ("watch",))
    sampler, taken = load_sampler(), (ctypes.c_uint64 * _MOST)()
    counts = {way: collections.Counter[int]() for way in steps}
    seconds = dict.fromkeys(steps, 0.0)
    for step in steps.values():
        [step() for _ in range(10)]
    for _ in range(tokens):
        for way, step in steps.items():
            bench_gpu.wait()
            if sampler.sampler_start(PERIOD_NS) != 0:
                raise SystemExit(
                    "bench_host.py: this system gives no timer for a thread: nothing was sampled"
                )
            begun = time.perf_counter()
            step()
            seconds[way] += time.perf_counter() - begun
            sampler.sampler_stop()
            counts[way].update(taken[: sampler.sampler_take(taken, _MOST)])
    return counts, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts, seconds = samples(options.tokens)
    places, scale = Places(), PERIOD_NS * 1e-6 / options.tokens
    document: dict[str, Any] = {"machine": machine(), "tokens": options.tokens}
    document["ms_a_token"] = {way: value / options.tokens * 1e3 for way, value in seconds.items()}
    print(document["ms_a_token"])
    for depth, name in ((1, "library"), (2, "function")):
        sums = {way: collections.Counter[str]() for way in counts}
        for way, addresses in counts.items():
            for address, count in addresses.items():
                sums[way][" ".join(places.of(address)[:depth])] += count
        rows = {
            key: (sums["plain"][key] * scale, sums["watch"][key] * scale)
            for key in {*sums["plain"], *sums["watch"]}
        }
        top = sorted(rows, key=lambda key: -abs(rows[key][1] - rows[key][0]))[: 15 * depth]
        document[name] = {key: rows[key] for key in top}
        cells = [
            (key, *(f"{value:.4f}" for value in (*rows[key], rows[key][1] - rows[key][0]))) for key in top
        ]
        print(table((name, "plain", "watched", "more"), cells))
    if options.json:
        write_json(options.json, document)


if __name__ == "__main__":
    main()
