"""Times fingerprints beside other reads of the same memory.

    python benchmarks/bench_fingerprint.py [--quick] [--json fingerprint.json]
    python benchmarks/bench_step.py --only gpt-2 --steps training --ways nanwatch trace fingerprints debug-mode

The first command times `torch.ops.nanwatch.fingerprint` and `range_and_fingerprint` beside `abs_range`,
torch.hash_tensor (which is equal for any permutation) and a plain read of the memory (README.md here). All are whole
calls from Python, interleaved. A ratio is taken within a round, and the median over rounds counts. The second command
times a training step with fingerprints, beside one under DebugMode with a hash of every operation.

Vector instructions in 1 KiB, from the disassembly, for float32:

- AVX-512: 48 for the range, 80 for the words of the hash, 18 to mix its lanes: together 3.0 times the range;
- AVX2: 96, 160 and 54: 3.2 times. A mix of 2 vectors takes 40 at least, so 3.1 times is the limit.

A whole call has a constant part too, which makes the ratio smaller.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _timing import Candidate, Plan, duration, interleave, machine, table, write_json
from bench_range import load_floor
from torch import Tensor

import nanwatch

DTYPES = ("float32", "bfloat16")
SIZES = (1 << 10, 64 << 10, 512 << 10, 8 << 20, 64 << 20, 256 << 20)  # bytes
QUICK_SIZES = (1 << 10, 512 << 10)
L2_BYTES, MEMORY_BYTES = 512 << 10, 64 << 20
PRECISE = Plan(min_rounds=9, max_rounds=151, budget=2.0, sample=1e-3)
QUICK = Plan(min_rounds=3, max_rounds=3, budget=0.0, sample=2e-4)
# How the same elements may lie in memory.
LAYOUTS = {
    "run": lambda x: x,
    "transposed": lambda x: x.view(-1, 512).T,
    "heads": lambda x: x.view(-1, 8, 64).transpose(0, 1),
}


def candidates(x: Tensor, floor: Any) -> dict[str, Candidate]:
    operators = torch.ops.nanwatch
    found = {name: Candidate(getattr(operators, name).default, x) for name in ("fingerprint", "abs_range")}
    found["both"] = Candidate(operators.range_and_fingerprint.default, x)
    found["hash_tensor"] = Candidate(torch.hash_tensor, x)
    if x.is_contiguous():
        for name in ("read_serial", "streams_serial", "read_threads", "streams_threads"):
            found[name] = Candidate(getattr(floor, name), x)
    else:
        found["contiguous"] = Candidate(torch.Tensor.contiguous, x)
    return found


def verify(x: Tensor) -> None:
    from nanwatch.numerics import _fingerprint

    if nanwatch.fingerprint(x) != int(_fingerprint.fingerprint(x)) % 2**64:
        raise SystemExit(
            f"the fingerprint of {x.shape} of {x.dtype} is not the reference's: nothing was timed"
        )


def measure(x: Tensor, layout: str, floor: Any, plan: Plan) -> dict[str, Any]:
    samples = interleave(candidates(x, floor), plan)
    seconds = {name: samples.seconds(name) for name in samples.rounds}
    row: dict[str, Any] = {"dtype": str(x.dtype), "nbytes": x.nbytes, "layout": layout, "seconds": seconds}
    row["to_range"] = {
        name: samples.ratio(name, "abs_range") for name in ("fingerprint", "both", "hash_tensor")
    }
    # The faster of one thread and all counts.
    for share, start in (("of_plain_read", "read"), ("of_fastest_read", "streams")):
        reads = [name for name in seconds if name.startswith(start)]
        if reads:
            read = min(reads, key=seconds.__getitem__)
            row[share] = {
                name: 1 / samples.ratio(name, read) for name in ("fingerprint", "both", "abs_range")
            }
    return row


def misses(row: dict[str, Any]) -> list[str]:
    """Return the targets that this row misses."""
    found = []
    if row["nbytes"] <= L2_BYTES and row["layout"] == "run" and max(row["to_range"]["both"], 0) > 3:
        found.append("3 times abs_range in L2")
    if row["nbytes"] >= MEMORY_BYTES and row.get("of_plain_read", {}).get("fingerprint", 1) < 0.8:
        found.append("0.8 of a plain read")
    return found


def cells(row: dict[str, Any]) -> list[str]:
    speed = row["nbytes"] / row["seconds"]["fingerprint"] / 1e9
    plain, fastest = row.get("of_plain_read", {}), row.get("of_fastest_read", {})
    return [
        f"{row['dtype'].removeprefix('torch.')}, {row['nbytes'] >> 10} KiB, {row['layout']}, {row['threads']} thr.",
        *(duration(row["seconds"][name]) for name in ("abs_range", "fingerprint", "both", "hash_tensor")),
        f"{speed:.1f}",
        *(f"{row['to_range'][name]:.2f}" for name in ("fingerprint", "both")),
        *(f"{plain[name]:.2f}" if plain else "-" for name in ("fingerprint", "both")),
        *(f"{fastest[name]:.2f}" if fastest else "-" for name in ("fingerprint", "abs_range")),
        ", ".join(row["misses"]) or "-",
    ]


HEADINGS = (
    *("tensor", "abs_range", "fingerprint", "both", "hash_tensor", "GB/s", "fp/range", "both/range"),
    *("fp of read", "both of read", "fp of fastest", "range of fastest", "misses"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="shows that it runs, measures little")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    options = parser.parse_args()
    floor = load_floor()
    rows: list[dict[str, Any]] = []
    for threads in sorted(set(options.threads)):
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for nbytes in QUICK_SIZES if options.quick else SIZES:
                for layout, arrange in LAYOUTS.items():
                    flat = torch.randn(nbytes // getattr(torch, dtype).itemsize).to(getattr(torch, dtype))
                    if layout != "run" and flat.nbytes not in (L2_BYTES, MEMORY_BYTES):
                        continue
                    x = arrange(flat)
                    verify(x)
                    row = measure(x, layout, floor, QUICK if options.quick else PRECISE)
                    rows.append({**row, "threads": threads})
                    rows[-1]["misses"] = misses(rows[-1])
    print(table(HEADINGS, [cells(row) for row in rows]))
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
