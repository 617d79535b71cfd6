"""Times would_fit with block formats beside a plain read of the same memory.

    python benchmarks/bench_block_fit.py [--quick] [--json benchmarks/results/block-fit-cpu-epyc.json]
    python benchmarks/bench_block_fit.py --device cuda [--json block_fit.json]

Whole calls from Python, interleaved, over a tensor that no cache holds. A ratio is that of a round to the plain read
(floor.cpp) in the same round, by two threads. The median over rounds counts. "in plain torch" is would_fit without the
compiled loops. With `--device cuda` a ratio is that of all that one call enqueues on the device, the copy to the host
included, and the time of the whole call stands beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from _range_cuda import Floor, kernel_seconds, make_input
from _timing import Candidate, Plan, interleave, machine, write_json
from bench_range import load_floor

from nanwatch import would_fit
from nanwatch.numerics import _extension, block_fit

FORMATS = ["mxfp8", "mxfp4", "nvfp4", "float8_rowwise", "float8_block128x128"]
DTYPES = (torch.float32, torch.bfloat16)


def in_plain_torch(x: torch.Tensor, name: str) -> None:
    with mock.patch.object(block_fit, "_native", lambda cuts, forms, amax: [None] * len(forms)):
        would_fit(x, name)


def candidates() -> dict[str, Callable[[torch.Tensor], object]]:
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        name: partial(would_fit, dtype=name) for name in FORMATS
    }
    return {
        **calls,
        "all five": partial(would_fit, dtype=FORMATS),
        "mxfp8 in plain torch": partial(in_plain_torch, name="mxfp8"),
    }


def on_cpu(quick: bool) -> Iterator[dict[str, object]]:
    floor = load_floor()
    plan = Plan(3, 3, 0.0, 2e-4) if quick else Plan(7, 31, 20.0, 1e-3)
    for dtype in DTYPES:
        x = torch.randn(1024 if quick else 8192, 4096).to(dtype)
        found = {**candidates(), "read": floor.read_threads}
        samples = interleave({name: Candidate(call, x) for name, call in found.items()}, plan)
        for name in found:
            yield row(x, name, samples.ratio(name, "read"), samples.seconds(name))


def on_cuda(quick: bool) -> Iterator[dict[str, object]]:
    native = _extension.C
    if not torch.cuda.is_available() or native is None or not native.cuda_compiled():
        raise SystemExit("--device cuda: torch sees no CUDA device here, or nanwatch was built without CUDA")
    device = torch.device("cuda", torch.cuda.current_device())
    floor, count = Floor(device), 4
    for dtype in DTYPES:
        nbytes = (16 if quick else 256) << 20
        xs = [make_input(nbytes, dtype, seed, device).view(-1, 4096) for seed in range(count)]
        floor_seconds = kernel_seconds(floor.read, xs, count)
        yield row(xs[0], "read", 1.0, floor_seconds)
        found = candidates()
        samples = interleave(
            {name: Candidate(call, xs[0]) for name, call in found.items()}, Plan(3, 9, 2.0, 1e-3)
        )
        for name, call in found.items():
            yield row(xs[0], name, kernel_seconds(call, xs, count) / floor_seconds, samples.seconds(name))


def row(x: torch.Tensor, what: str, reads: float, seconds: float) -> dict[str, object]:
    print(f"{x.dtype!s:15} {what:22} {reads:7.2f} reads  {x.nbytes / seconds / 1e9:8.2f} GB/s", flush=True)
    return {"dtype": str(x.dtype), "nbytes": x.nbytes, "what": what, "reads": reads, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="16 MiB and few rounds")
    options = parser.parse_args()
    results = list((on_cuda if options.device == "cuda" else on_cpu)(options.quick))
    if options.json:
        gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
        write_json(options.json, {"machine": machine(**gpu), "results": results})


if __name__ == "__main__":
    main()
