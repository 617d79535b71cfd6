"""The kernel of one frame on a GPU: 24 small tensors in one launch, and the kernels that ncu looks at.

python benchmarks/bench_frame.py --json frame.json       # ten seconds
ncu ... python benchmarks/bench_frame.py --only-kernels  # a few launches of each kernel, nothing timed
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _range_cuda import CudaRow, kernel_seconds, make_input
from _targets import Target
from _timing import duration, machine, write_results
from torch import Tensor

from nanwatch.numerics import _extension

TENSORS = 24
# A bias, a LayerNorm's weight, the activations of one token: from 3 KiB to 96 KiB in bfloat16.
NUMELS = (768, 1536, 4096, 12_288, 24_576, 49_152)
WANTED = 8e-6


def frames(count: int, device: torch.device) -> list[list[Tensor]]:
    """So many frames of 24 tensors, each of its own numbers."""
    return [
        [
            make_input(2 * NUMELS[i % len(NUMELS)], torch.bfloat16, TENSORS * frame + i, device)
            for i in range(TENSORS)
        ]
        for frame in range(count)
    ]


def _launches_of_each_kernel(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        x = make_input(1 << 30, dtype, 0, device)
        for function in (_extension.abs_range, _extension.health):
            function(x)
            function(x)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--only-kernels", action="store_true", help="launch each kernel twice and time nothing"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_frame.py: torch sees no CUDA device here")
    device = torch.device("cuda", torch.cuda.current_device())
    if options.only_kernels:
        _launches_of_each_kernel(device)
        return
    made = frames(16, device)
    for frame in made:
        for row, x in zip(_extension.abs_ranges(frame).tolist(), frame, strict=True):
            wide = x.double().abs()
            if row[:2] != [wide.min().item(), wide.max().item()]:
                raise SystemExit(f"a frame's row is {row[:2]} where torch finds otherwise: nothing was timed")
    seconds = kernel_seconds(_extension.abs_ranges, made, 200)
    target = Target("frame of 24 small tensors, us", "<= 8", f"{seconds * 1e6:#.3g}", seconds <= WANTED, "")
    print(f"24 tensors, {sum(x.nbytes for x in made[0]) >> 10} KiB: {duration(seconds)} in kernels")
    print(f"{target.name}: wanted {target.wanted}, found {target.found}")
    if options.json:
        about = machine(gpu=torch.cuda.get_device_name(), cuda=str(torch.version.cuda))
        row = CudaRow(f"bfloat16, {TENSORS} tensors", sum(x.nbytes for x in made[0]), {"nanwatch": seconds})
        write_results(options, about, [row], [target])


if __name__ == "__main__":
    main()
