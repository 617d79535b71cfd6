"""Cost of watching a module call, and a batch: Linears with a small tensor in and one out, their weights known.

    python benchmarks/bench_call.py [--quick] [--json FILE]

Two Sequentials, of 8 and of 136 Linears, in four ways: plain, watched, watched without a black box, and with an empty
forward hook on each module, which is what PyTorch's own hook machinery costs. What is added is taken within a round,
the median over rounds counts; what 128 calls more add is the cost of a call, and what is left of the short one that of
a batch.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from _timing import Candidate, Plan, Samples, interleave, machine, table, write_json
from torch import nn

import nanwatch

SHORT, LONG = 8, 136
WAYS = ("plain", "watched", "no-box", "hook")
PLAN = Plan(min_rounds=101, max_rounds=401, budget=30.0, sample=5e-3)
QUICK_PLAN = Plan(min_rounds=3, max_rounds=3, budget=0.0, sample=1e-4)


def measured(plan: Plan) -> Samples:
    """All lengths in all ways, by `way length`."""
    models = {f"{way} {length}": linears(length) for way in WAYS for length in (SHORT, LONG)}
    watches = []
    for name, model in models.items():
        if name.startswith("watched"):
            watches.append(nanwatch.watch(model))
        elif name.startswith("no-box"):
            watches.append(nanwatch.watch(model, black_box=False))
        elif name.startswith("hook"):
            model.apply(lambda module: module.register_forward_hook(lambda *_: None))
    x = torch.ones(2, 8)
    with torch.no_grad():
        samples = interleave({name: Candidate(model, x) for name, model in models.items()}, plan)
    for watch in watches:
        watch.stop()
    return samples


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def costs(samples: Samples, way: str) -> tuple[float, float]:
    """Seconds that this way adds to a call, and to a batch beside its calls."""

    def added(length: int) -> float:
        pairs = zip(samples.rounds[f"{way} {length}"], samples.rounds[f"plain {length}"], strict=True)
        return statistics.median(one - plain for one, plain in pairs)

    call = (added(LONG) - added(SHORT)) / (LONG - SHORT)
    return call, added(SHORT) - (SHORT + 1) * call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="shows that it runs, measures nothing")
    options = parser.parse_args()
    samples = measured(QUICK_PLAN if options.quick else PLAN)
    found = {way: dict(zip(("call_s", "batch_s"), costs(samples, way), strict=True)) for way in WAYS[1:]}
    rows = [[way, *(f"{seconds * 1e6:.3f}" for seconds in row.values())] for way, row in found.items()]
    print(table(["added by", "a call, us", "a batch, us"], rows))
    plain = (samples.seconds(f"plain {LONG}") - samples.seconds(f"plain {SHORT}")) / (LONG - SHORT)
    print(f"\na plain call: {plain * 1e6:.3f} us")
    if options.json:
        write_json(options.json, {"machine": machine(), "plain_call_s": plain, "added": found})


if __name__ == "__main__":
    main()
