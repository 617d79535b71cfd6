"""Times would_fit with block formats beside a plain read of the same memory.

    python benchmarks/bench_block_fit.py [--quick] [--json benchmarks/results/block-fit-cpu-epyc.json]

Whole calls from Python, interleaved, over a tensor that no cache holds. A ratio is that of a round to the plain read
(floor.cpp) in the same round, by two threads. The median over rounds counts. "in plain torch" is would_fit without the
compiled loops.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import torch
from _timing import Candidate, Plan, interleave, machine, write_json
from bench_range import load_floor

from nanwatch import would_fit
from nanwatch.numerics import block_fit

FORMATS = ["mxfp8", "mxfp4", "nvfp4", "float8_rowwise", "float8_block128x128"]
DTYPES = (torch.float32, torch.bfloat16)


def in_plain_torch(x: torch.Tensor, name: str) -> None:
    with mock.patch.object(block_fit, "_native", lambda cuts, forms, amax: [None] * len(forms)):
        would_fit(x, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="16 MiB and few rounds")
    options = parser.parse_args()
    floor = load_floor()
    rows = 1024 if options.quick else 8192
    plan = Plan(3, 3, 0.0, 2e-4) if options.quick else Plan(7, 31, 20.0, 1e-3)
    results = []
    for dtype in DTYPES:
        x = torch.randn(rows, 4096).to(dtype)
        candidates = {name: Candidate(lambda y, name=name: would_fit(y, name), x) for name in FORMATS}
        candidates["all five"] = Candidate(lambda y: would_fit(y, FORMATS), x)
        candidates["mxfp8 in plain torch"] = Candidate(lambda y: in_plain_torch(y, "mxfp8"), x)
        candidates["read"] = Candidate(floor.read_threads, x)
        samples = interleave(candidates, plan)
        for name in candidates:
            ratio = samples.ratio(name, "read")
            results.append({"dtype": str(dtype), "nbytes": x.nbytes, "what": name, "reads": ratio})
            print(
                f"{dtype!s:15} {name:22} {ratio:6.2f} reads  {x.nbytes / samples.seconds(name) / 1e9:6.2f} GB/s"
            )
    if options.json:
        write_json(options.json, {"machine": machine(), "results": results})


if __name__ == "__main__":
    main()
