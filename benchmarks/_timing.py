"""Interleaved timing: every candidate once a round, so that what the machine does meanwhile happens to all.

A shared machine's bandwidth drifts by tens of per cent within a minute. Times taken one candidate after the
other compare minutes; ratios taken within a round, and their median over rounds, compare functions.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import random
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing to time: `function(argument)`, called exactly so."""

    function: Callable[[Any], Any]
    argument: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure: `min_rounds`, then on until `max_rounds` or `budget` seconds, whichever is first.

    `sample` is the least time in seconds of one sample; a short call is repeated inside it, so that a tenth of
    a microsecond is resolved.
    """

    min_rounds: int
    max_rounds: int
    budget: float
    sample: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds per call, one number a round for each candidate; the n-th of each are from the n-th round."""

    rounds: Mapping[str, Sequence[float]]

    def seconds(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, base: str) -> float:
        """The median over rounds of time(name) / time(base)."""
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True))


def _repeats(timer: timeit.Timer, sample: float) -> int:
    """How often to call so that one sample takes about `sample` seconds; warms up on the way."""
    timer.timeit(1)
    number = 1
    while True:
        seconds = timer.timeit(number)
        if seconds >= sample / 2:
            return max(1, math.ceil(number * sample / seconds))
        number *= 4


def interleave(candidates: Mapping[str, Candidate], plan: Plan) -> Samples:
    """Time the candidates against each other.

    The order is shuffled every round (seeded): in a fixed order one of them would always find the caches that
    a certain other one left.
    """
    # Setup puts both names into the timed loop's locals: two global look-ups are a fifth of a 0.1 us call.
    setup = "f, x = candidate.function, candidate.argument"
    timers = {
        name: timeit.Timer("f(x)", setup, globals={"candidate": candidate})
        for name, candidate in candidates.items()
    }
    numbers = {name: _repeats(timer, plan.sample) for name, timer in timers.items()}
    rounds: dict[str, list[float]] = {name: [] for name in timers}
    shuffle = random.Random(0).shuffle
    order = list(timers)
    end = time.perf_counter() + plan.budget
    for done in range(plan.max_rounds):
        if done >= plan.min_rounds and time.perf_counter() > end:
            break
        shuffle(order)
        for name in order:
            rounds[name].append(timers[name].timeit(numbers[name]) / numbers[name])
    return Samples(rounds)


# ---- the machine ----


def _first_line(path: str, key: str) -> str:
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


def cache_bytes(level: int) -> int:
    """Size of the data cache of this level as the first core sees it, 0 where the system does not say."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            facts = {name: (index / name).read_text().strip() for name in ("level", "type", "size")}
        except OSError:
            continue
        if facts["level"] == str(level) and facts["type"] in ("Data", "Unified"):
            return int(facts["size"].removesuffix("K")) << 10
    return 0


def available_bytes() -> int:
    """Memory that can be allocated now, 0 where the system does not say."""
    text = _first_line("/proc/meminfo", "MemAvailable")
    return int(text.split()[0]) << 10 if text else 0


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: where it gives blocks back, the faults of taking them anew are in every time.

    In a training step of ResNet-50 these are some 100,000, in each step another number, whether it is watched or not.
    Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_max = -1, -2, -4
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 64 << 20)


def machine(**more: str) -> dict[str, Any]:
    """Return the facts about the machine on which the numbers depend."""
    return {
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "cache_bytes": {f"L{level}": cache_bytes(level) for level in (1, 2, 3)},
        "available_bytes": available_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **more,
    }


# ---- output ----


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text: the first column and those without a heading to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 or not headings[i] else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), line(["-" * w for w in widths]), *map(line, rows)])


def duration(seconds: float) -> str:
    """Three significant digits in the unit that suits."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * scale:
            return f"{seconds / scale:#.3g} {unit}"
    return f"{seconds:#.3g} s"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_results(
    options: argparse.Namespace, about: Mapping[str, Any], rows: Sequence[Any], targets: Sequence[Any]
) -> None:
    """Write rows and targets, with what they depend on, to `options.json`, if that is a path."""
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        found = {"rows": [row.to_json() for row in rows], "targets": [target.to_json() for target in targets]}
        write_json(options.json, {"version": 1, "machine": about, "settings": settings, **found})
