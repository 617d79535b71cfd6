"""How long a failure takes to explain: from the call that fails to the exception with the whole report.

    python benchmarks/bench_postmortem.py [--json FILE]
    python benchmarks/bench_postmortem.py --quick

GPT-2 124M from its real configuration, seeded weights, fp16 autocast: the last feed-forward overflows. Timed, in turn
and in one process: a forward that does not fail; the failing one with the first report only (`microscope=False`); with
the second run and the cures; and with capsule, HTML, JSON and text written too. The added time is that of a failing
call over that of the first kind of failing call, and is to stay under three forwards and two seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _steps import gpt2, tokens
from _timing import machine, table, write_json
from torch import nn

import nanwatch


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def small() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="one round of a small model: a smoke test, not a result"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1

    torch.manual_seed(0)
    model = (small() if options.quick else gpt2()).eval()
    # The last block's feed-forward, as a run that diverges leaves it: its product passes 65504.
    last = max(
        int(name.split(".")[2]) for name, _ in model.named_modules() if name.startswith("transformer.h.")
    )
    weight = model.get_parameter(f"transformer.h.{last}.mlp.c_proj.weight")
    ids = tokens(1, 64)

    def forward() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            model(input_ids=ids)

    def failing(**watched: object) -> nanwatch.Report:
        with nanwatch.watch(model, **watched) as watch:  # type: ignore[arg-type]
            try:
                forward()
            except nanwatch.NonFiniteError as error:
                str(error)
                return error.report
        raise AssertionError(f"the model did not fail: {watch.report().to_text()}")

    forward()
    plain = [seconds(forward) for _ in range(options.rounds)]
    with torch.no_grad():
        weight.mul_(3e5)
    ways: dict[str, dict[str, object]] = {
        "first report only": {"microscope": False},
        "second run and cures": {},
        "and everything written": {},
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    finding = None
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds + 1):
            for name, watched in ways.items():
                given = {**watched, "output_dir": folder} if "written" in name else watched
                start = time.perf_counter()
                finding = failing(**given).finding
                if turn:  # the first one imports what is needed
                    times[name].append(time.perf_counter() - start)
    assert finding is not None
    assert finding.operation is not None
    assert len(finding.files) == 4
    base, one = statistics.median(times["first report only"]), statistics.median(plain)
    rows = [(name, statistics.median(taken)) for name, taken in times.items()]
    print(
        table(
            ("failing call", "time", "added", "in forwards"),
            [
                (name, f"{t:.2f} s", f"{t - base:.2f} s", f"{(t - base) / one:.1f}")
                for name, t in [("a forward, finite", one), *rows]
            ],
        )
    )
    added = rows[-1][1] - base
    bound = 3 * one + 2
    print(f"\nadded {added:.2f} s, to stay under {bound:.2f} s: {'pass' if added < bound else 'MISS'}")
    if options.json:
        found = {"forward_s": one, "times_s": dict(rows), "added_s": added, "bound_s": bound}
        write_json(options.json, {"machine": machine(), "cures": [c.what for c in finding.cures], **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
