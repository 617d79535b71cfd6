"""Cost of watching a whole step: forwards, one-token decodes and training steps of real architectures.

    python benchmarks/bench_step.py [--quick] [--only gpt-2] [--steps training] [--ways nanwatch trace] [--json FILE]

The same model runs in several ways in turn, a round each: plain, with nanwatch.watch, with the transformers class, with
an empty forward hook on every module (what PyTorch's own hook machinery costs), watched without forecasts, watched
without a black box, watched and traced, traced with fingerprints, watched with statistics in every batch, under torch's
DebugMode with a hash of every operation, and, in training, watched with gradients and under
torch.autograd.detect_anomaly. One model serves all: two copies of a model can lie in memory of two speeds. A ratio is
taken within a round; the median over rounds counts.

"plain read" is what nanwatch had to read over the bandwidth of a plain read of memory in this run. Memory that is freed
stays with the process, or the page faults of taking it anew would drown what is compared. To a trace's ratio the CPU
time of the thread that writes it is added, as if nothing of it ran beside the step. Weights are random and seeded, the
configurations are the real ones; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _steps import Step, cases
from _timing import duration, keep_freed_memory, machine, table, write_json
from _ways import NAMES, OF_BACKWARDS, SLOW, Ways
from bench_range import load_floor
from torch import nn

COUNTERS = ("calls", "tensors", "tensors_read", "bytes_read", "cache_hits")


def seconds(step: Step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def measure(
    model: nn.Module, step: Step, names: set[str], budget: float, min_rounds: int, read_speed: float
) -> dict[str, Any]:
    """One row: the median seconds of a plain step, and the ratio to it of each way."""
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(model, names, Path(folder))
        try:
            return _measured(ways, step, budget, min_rounds, read_speed)
        finally:
            ways.stop()


def _measured(ways: Ways, step: Step, budget: float, min_rounds: int, read_speed: float) -> dict[str, Any]:
    for way in ways.by_name.values():
        with way():
            step(), step()
    repeats = max(1, round(0.05 / seconds(step, 1))) if budget else 1
    rounds: dict[str, list[float]] = {name: [] for name in ways.by_name}
    shuffle, order = random.Random(0).shuffle, list(ways.by_name)
    before = {name: dict(watch.counters) for name, watch in ways.watches.items()}
    writing = ways.writer_seconds()
    steps = 0
    end = time.perf_counter() + budget
    while len(rounds["plain"]) < min_rounds or (time.perf_counter() < end and len(rounds["plain"]) < 200):
        shuffle(order)
        for name in order:
            if name in SLOW and len(rounds[name]) >= min_rounds:
                continue
            with ways.by_name[name]():
                rounds[name].append(seconds(step, repeats))
        steps += repeats
    plain = statistics.median(rounds["plain"])
    row: dict[str, Any] = {"plain_s": plain, "rounds": len(rounds["plain"])}
    row |= {f"ratio_{key(name)}": ratio(rounds, name) for name in rounds if name != "plain"}
    if "trace" in rounds:
        time.sleep(1.5 if budget else 0.0)  # it takes what is there once a second
        row["trace_writer_share"] = share = (ways.writer_seconds() - writing) / steps / plain
        row["ratio_trace"] += share
    for name in ("trace", "gradients"):
        if name in rounds and "nanwatch" in rounds:
            # Both from the same rounds; the trace includes its writer.
            row[f"added_by_{name}"] = (
                ratio(rounds, name, "nanwatch") - 1 + (share if name == "trace" else 0.0)
            )
    if "fingerprints" in rounds and "trace" in rounds:
        row["added_by_fingerprints"] = ratio(rounds, "fingerprints", "trace") - 1
    if "nanwatch" in rounds:
        after = ways.watches["nanwatch"].counters
        row |= {name: (after[name] - before["nanwatch"][name]) / steps for name in COUNTERS}
        row["plain_read"] = row["bytes_read"] / read_speed / plain
    return row


def key(name: str) -> str:
    return name.replace("-", "_")


def ratio(rounds: dict[str, list[float]], name: str, base: str = "plain") -> float:
    return statistics.median(a / b for a, b in zip(rounds[name], rounds[base], strict=False))


def misses(step: str, row: dict[str, Any]) -> list[str]:
    """Return the targets that this row misses."""
    is_training = step.startswith("training")
    missed = {"ratio": row.get("ratio_nanwatch", 0.0) > (1.02 if is_training else 1.03)}
    for name, most in (("trace", 0.02), ("fingerprints", 0.03), ("gradients", 0.02)):
        missed[f"{name} added"] = is_training and row.get(f"added_by_{name}", 0.0) > most
    return [what for what in missed if missed[what]]


def ratio_cell(way: str, digits: int = 3) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[f'ratio_{key(way)}']:.{digits}f}"


# Heading, and how a row fills it; "-" where it has not what that takes.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": lambda row: f"{row['model']}, {row['step']}",
    "plain": lambda row: duration(row["plain_s"]),
    "nanwatch": ratio_cell("nanwatch"),
    "no forecast": ratio_cell("forecast-off"),
    "no box": ratio_cell("no-box"),
    "trace": ratio_cell("trace"),
    "bits": ratio_cell("fingerprints"),
    "gradients": ratio_cell("gradients"),
    "anomaly": ratio_cell("detect-anomaly", 2),
    "DebugMode": ratio_cell("debug-mode", 2),
    "transf.": ratio_cell("transformers", 2),
    "hooks": ratio_cell("hooks"),
    "plain read": lambda row: f"{row['plain_read']:.2%}",
    "read": lambda row: f"{row['tensors_read']:.0f}/{row['tensors']:.0f}",
    "MB": lambda row: f"{row['bytes_read'] / 1e6:.1f}",
    "hits": lambda row: f"{row['cache_hits']:.0f}",
    "misses": lambda row: ", ".join(row["misses"]) or "-",
}


def cell(row: dict[str, Any], heading: str) -> str:
    try:
        return COLUMNS[heading](row)
    except KeyError:
        return "-"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--steps", default="", help="steps whose name contains this, such as training")
    parser.add_argument(
        "--ways", nargs="+", choices=NAMES, default=list(NAMES), help="beside the plain one (default all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two rounds each: shows that it runs, measures nothing"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time of a row (default 20)")
    options = parser.parse_args()
    budget, least = (0.0, 2) if options.quick else (options.seconds, 7)
    keep_freed_memory()
    floor = load_floor().streams_threads
    buffer = torch.randn(64 << 20)
    floor(buffer)
    read_speed = buffer.nbytes / statistics.median(seconds(lambda: floor(buffer), 1) for _ in range(9))
    rows: list[dict[str, Any]] = []
    for case in cases():
        if options.only.lower() not in case.name.lower():
            continue
        for name, make in case.steps.items():
            if options.steps.lower() not in name:
                continue
            torch.manual_seed(0)
            model = case.build()
            names = set(options.ways) - (set() if name.startswith("training") else set(OF_BACKWARDS))
            row = measure(model, make(model), names, budget, least, read_speed)
            row = {"model": case.name, "step": name, **row, "misses": misses(name, row)}
            rows.append(row)
            cells = [f"{heading} {cell(row, heading)}" for heading in list(COLUMNS)[2:10]]
            print(f"{case.name}, {name}: {', '.join(cells)}", flush=True)
            if options.json:  # row by row: the whole takes minutes
                write_json(options.json, {"machine": machine(), "read_bytes_per_s": read_speed, "rows": rows})
    print()
    print(table(list(COLUMNS), [[cell(row, heading) for heading in COLUMNS] for row in rows]))
    print(f"\nplain read of memory: {read_speed / 1e9:.1f} GB/s; times of a step are ratios to the plain one")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
