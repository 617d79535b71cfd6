"""How fast the range of a tensor is, and next to what: verify, then time, then say which targets are met.

    python benchmarks/bench_range.py --json range.json
    python benchmarks/bench_range.py --quick
    python benchmarks/bench_range.py --dtype bfloat16 --sizes 1e4 1e6 --threads 1 --only floor compile

Every time is of a whole call from Python, in one process, interleaved; every ratio is time(other) /
time(nanwatch.abs_range) within a round, and its median over rounds. README.md here says what each column is.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from _targets import Row, judge
from _timing import Candidate, Plan, available_bytes, duration, interleave, machine, table, write_results
from torch import Tensor

import nanwatch
from nanwatch.numerics.formats import AbsRange

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
SIZES = (16, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
QUICK_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
QUICK_SIZES = (16, 10_000, 1_000_000)
RIVALS = ("transformers", "aminmax", "compile", "numpy")
PARTS = ("floor", "health", *RIVALS, "strided")
Read = Callable[[Tensor], Any]

# The share of the floor is wanted to a hundredth, a factor of fifty is not: hence two groups of rounds.
PRECISE = Plan(min_rounds=9, max_rounds=151, budget=2.0, sample=1e-3)
ROUGH = Plan(min_rounds=5, max_rounds=15, budget=2.0, sample=1e-3)
QUICK = Plan(min_rounds=3, max_rounds=5, budget=0.1, sample=2e-4)


# ---- what is timed ----


def load_floor() -> ModuleType:
    """The plain read of memory, compiled on the first run (half a minute)."""
    from torch.utils import cpp_extension

    # ninja lies beside the interpreter in a virtual environment, which need not be activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        return cpp_extension.load(
            name="nanwatch_floor",
            sources=[str(Path(__file__).with_name("floor.cpp"))],
            extra_cflags=["-O3", "-fopenmp"],
        )
    except (OSError, RuntimeError, ImportError) as error:
        others = " ".join(part for part in PARTS if part != "floor")
        raise SystemExit(
            f"floor.cpp could not be built: {error}\n"
            f"It needs a C++ compiler and ninja; to do without the floor: --only {others}"
        ) from error


def range_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three reductions as torch offers them; min and max know no float8."""
    x = upcast(x)
    a = x.abs()
    return a.min(), a.max(), torch.isfinite(x).all()


def upcast(x: Tensor) -> Tensor:
    return x.float() if x.element_size() == 1 else x


def transformers_range() -> Read:
    from transformers.debug_utils import detect_overflow, get_abs_min_max

    def read(x: Tensor) -> tuple[str, bool]:
        x = upcast(x)
        return get_abs_min_max(x, "output"), detect_overflow(x, "output")

    return read


def compiled_range() -> Read:
    # One kernel for each shape and number of threads: what a kernel for all shapes would lose is not charged.
    torch.compiler.reset()
    graph = torch.compile(range_of, dynamic=False)

    def read(x: Tensor) -> tuple[float, float, bool]:
        low, high, finite = graph(x)
        return low.item(), high.item(), finite.item()

    return read


def aminmax(x: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(upcast(x).abs())
    return low.item(), high.item()


def numpy_range(a: np.ndarray) -> tuple[float, float, bool]:
    magnitude = np.abs(a)
    return float(magnitude.min()), float(magnitude.max()), bool(np.isfinite(a).all())


def rivals(x: Tensor, only: set[str]) -> dict[str, Candidate]:
    reads: dict[str, Callable[[], Read]] = {
        "transformers": transformers_range,
        "aminmax": lambda: aminmax,
        "compile": compiled_range,
    }
    chosen = {name: Candidate(make(), x) for name, make in reads.items() if name in only}
    if "numpy" in only and x.dtype in (torch.float64, torch.float32, torch.float16):
        chosen["numpy"] = Candidate(numpy_range, x.numpy())
    return chosen


# ---- verify before timing ----


def make_input(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers, new for each row."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(numel, dtype=wide, generator=generator).to(dtype)


def oracle(x: Tensor) -> tuple[float, float, bool]:
    """In float64, by parts: a copy of 1e8 elements would take 0.8 GB."""
    low, high, finite = math.inf, 0.0, True
    for part in x.flatten().split(1 << 22):
        wide = upcast(part).double()
        low, high = min(low, wide.abs().min().item()), max(high, wide.abs().max().item())
        finite = finite and bool(torch.isfinite(wide).all())
    return low, high, finite


def verify(name: str, given: object, wanted: object) -> None:
    if given != wanted:
        raise SystemExit(f"{name} gives {given} where {wanted} is right: nothing was timed")


def verify_candidates(x: Tensor, candidates: dict[str, Candidate]) -> None:
    """Every candidate but the floor must give the float64 range of `x`, or the part of it that it computes."""
    wanted = oracle(x)
    for name, candidate in candidates.items():
        result = candidate.function(candidate.argument)
        what = f"{name} on {x.numel()} elements of {x.dtype}"
        if name == "transformers":
            verify(what, result, (f"{wanted[0]:8.2e} {wanted[1]:8.2e} output", not wanted[2]))
        elif name.startswith(("floor", "plain")):
            words = np.zeros(-(-x.nbytes // 8) * 8, dtype=np.uint8)
            words[: x.nbytes] = x.view(torch.uint8).numpy()
            verify(what, result, int(np.bitwise_xor.reduce(words.view(np.uint64))))
        elif name == "health":
            verify(what, (result.abs_min, result.abs_max, result.isfinite), wanted)
        else:
            verify(what, tuple(result), wanted[: len(result)])


# ---- rows ----


def keep_fastest_reads(*columns: dict[str, float]) -> None:
    """Keep the faster of one thread and all for each read, as a second one hurts below some hundred KiB.

    "floor" is the fastest of them all, as four places at once hurt in some caches."""
    seconds = columns[0]
    reads = [name for name in seconds if name.startswith(("plain", "floor"))]
    if reads:
        plain = min((name for name in reads if name.startswith("plain")), key=seconds.__getitem__)
        floor = min(reads, key=seconds.__getitem__)
        for column in columns:
            kept = {"plain": column[plain], "floor": column[floor]}
            for name in reads:
                del column[name]
            column |= kept


def dense_row(
    dtype: str, numel: int, threads: int, floor: ModuleType | None, only: set[str], quick: bool
) -> Row:
    x = make_input(numel, DTYPES[dtype], seed=numel)
    precise = {"nanwatch": Candidate(nanwatch.abs_range, x)}
    if "health" in only:
        precise["health"] = Candidate(nanwatch.tensor_health, x)
    if floor is not None:
        reads = {"plain": floor.read_serial, "floor": floor.streams_serial}
        if threads > 1:
            reads |= {"plain threads": floor.read_threads, "floor threads": floor.streams_threads}
        precise |= {name: Candidate(read, x) for name, read in reads.items()}
    others = rivals(x, only)
    verify_candidates(x, {**precise, **others})

    samples = interleave(precise, QUICK if quick else PRECISE)
    seconds = {name: samples.seconds(name) for name in precise}
    ratios = {name: samples.ratio(name, "nanwatch") for name in precise if name != "nanwatch"}
    keep_fastest_reads(seconds, ratios)
    if others:
        samples = interleave({"nanwatch": precise["nanwatch"], **others}, QUICK if quick else ROUGH)
        seconds |= {name: samples.seconds(name) for name in others}
        ratios |= {name: samples.ratio(name, "nanwatch") for name in others}
    return Row("dense", dtype, f"{numel}", numel, x.nbytes, threads, seconds, ratios)


def views(dtype: str, quick: bool) -> Iterator[tuple[str, Tensor]]:
    """The shapes that are read without a copy: name and view, from a few KiB to some tens of MiB."""
    for rows in (512,) if quick else (512, 8192):
        base = make_input(rows * 1024, DTYPES[dtype], seed=rows).view(rows, 1024)
        for k in (8, 64, 512) if quick else (8, 16, 32, 64, 128, 256, 512):
            yield f"{rows}x1024 [:, :{k}]", base[:, :k]
        yield f"{rows}x1024 .t()", base.t()
        yield f"{rows}x1024 [::2, ::2]", base[::2, ::2]
        yield f"1024 .expand({rows}, -1)", base[0].expand(rows, -1)


def read_copy(x: Tensor) -> AbsRange:
    return nanwatch.abs_range(x.contiguous())


def strided_row(dtype: str, name: str, x: Tensor, threads: int, quick: bool) -> Row:
    candidates = {"nanwatch": Candidate(nanwatch.abs_range, x), "contiguous": Candidate(read_copy, x)}
    verify_candidates(x, candidates)
    samples = interleave(candidates, QUICK if quick else PRECISE)
    seconds = {candidate: samples.seconds(candidate) for candidate in candidates}
    ratios = {"contiguous": samples.ratio("contiguous", "nanwatch")}
    return Row("strided", dtype, name, x.numel(), x.numel() * x.element_size(), threads, seconds, ratios)


def fits(numel: int, dtype: str) -> bool:
    """Return whether the hungriest rival fits: numpy and transformers hold the tensor, its magnitude and masks.

    With float8 they also hold the tensor in float32."""
    size = DTYPES[dtype].itemsize
    needed = numel * (10 if size == 1 else 3 * size)
    available = available_bytes()
    return available == 0 or needed < 0.8 * available


def measure(options: argparse.Namespace, floor: ModuleType | None) -> Iterator[Row]:
    only = set(options.only)
    for threads in options.threads:
        torch.set_num_threads(threads)
        for dtype in options.dtype:
            for numel in options.sizes if only - {"strided"} else ():
                if not fits(numel, dtype):
                    print(f"left out, too little memory: {dtype} x {numel}", file=sys.stderr)
                    continue
                yield dense_row(dtype, numel, threads, floor, only, options.quick)
            if "strided" in only:
                for name, x in views(dtype, options.quick):
                    yield strided_row(dtype, name, x, threads, options.quick)


# ---- output ----


def dense_table(rows: list[Row]) -> str:
    columns = ("plain", "floor", "health", *RIVALS)
    names = [name for name in columns if any(name in row.ratios for row in rows)]
    headings = ["dtype", "elements", "nanwatch", "GB/s", *names]
    body = []
    for row in rows:
        cells = [f"{row.ratios[name]:#.3g}" if name in row.ratios else "n/a" for name in names]
        time = row.seconds["nanwatch"]
        body.append([row.dtype, row.shape, duration(time), f"{row.nbytes / time / 1e9:#.3g}", *cells])
    return table(headings, body)


def strided_table(rows: list[Row]) -> str:
    body = [
        [f"{row.dtype} {row.shape}", duration(row.seconds["nanwatch"]), f"{row.ratios['contiguous']:#.3g}"]
        for row in rows
    ]
    return table(["view", "nanwatch", ".contiguous() first"], body)


def print_results(rows: list[Row]) -> None:
    for threads in sorted({row.threads for row in rows}):
        mine = [row for row in rows if row.threads == threads]
        for kind, render in (("dense", dense_table), ("strided", strided_table)):
            if chosen := [row for row in mine if row.kind == kind]:
                print(
                    f"\n{kind}, {threads} thread{'s' * (threads > 1)}; other columns: time / nanwatch's time"
                )
                print(render(chosen))
    print("\ntargets")
    body = [[t.name, t.wanted, t.found, "pass" if t.passed else f"MISS at {t.where}"] for t in judge(rows)]
    print(table(["what", "wanted", "found", ""], body))


def whole(text: str) -> int:
    """An argument such as 1000000 or 1e6."""
    value = float(text)
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up, such as 1000000 or 1e6")
    return int(value)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    every = torch.get_num_threads()
    parser.add_argument("--quick", action="store_true", help="few rows and rounds: no result")
    parser.add_argument("--json", type=Path, help="write machine, rows and targets here")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, metavar="DTYPE", help="default: all nine")
    parser.add_argument(
        "--sizes", nargs="+", type=whole, metavar="N", help="elements; default: 16, 100 … 1e8"
    )
    parser.add_argument("--threads", nargs="+", type=whole, default=sorted({1, every}), metavar="N")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or (QUICK_DTYPES if options.quick else tuple(DTYPES))
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    # torch.compile compiles for each row: a second or more each.
    options.only = options.only or [part for part in PARTS if part != "compile" or not options.quick]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    # Each shape is one more entry in the cache of the same function.
    torch._dynamo.config.recompile_limit = 1000
    floor = load_floor() if "floor" in options.only else None
    native = nanwatch.numerics._extension.C
    about = machine(
        nanwatch="compiled part missing" if native is None else native.cpu_capability(),
        floor="" if floor is None else floor.isa(),
    )
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    if native is None:
        print(
            f"WARNING: this times the pure-torch fallback: {nanwatch.numerics._extension.reason}",
            file=sys.stderr,
        )
    rows: list[Row] = []
    for row in measure(options, floor):
        rows.append(row)
        print(f"[{len(rows)}] {row.where}: {duration(row.seconds['nanwatch'])}", file=sys.stderr, flush=True)
    print_results(rows)
    write_results(options, about, rows, judge(rows))


if __name__ == "__main__":
    main()
