"""How long a failure takes to explain: from the call that fails to the exception with the whole report.

    python benchmarks/bench_rerun.py [--json FILE]
    python benchmarks/bench_rerun.py --quick

Two failures of a GPT-2 124M from its real configuration with seeded weights, each of 8 tokens: the last feed-forward
overflows under fp16 autocast, which a wider format cures, and a mean over no token divides by zero in float32, which a
change of the source cures. Timed, in turn and in one process: a forward that does not fail; the failing one with the
first report only (`rerun=False`); with the second run and the cures; and with the files written too. The added
time is that of a failing call over that of the first kind of failing call, and is to stay under eight forwards and two
seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _steps import gpt2, tokens
from _timing import machine, table, write_json
from torch import Tensor, nn

import nanwatch

TOKENS = 8
WAYS: dict[str, dict[str, object]] = {
    "first report only": {"rerun": False},
    "second run and cures": {},
    "and everything written": {},
}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def small() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2))


class PooledMean(nn.Module):
    """The mean of the last hidden states over the tokens that count."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor, counts: Tensor) -> Tensor:
        hidden = self.body(input_ids=ids).last_hidden_state
        return (hidden * counts.unsqueeze(-1)).sum(1) / counts.sum(1, keepdim=True)


class Case(NamedTuple):
    """A model, a forward that ends well, one that fails, and what makes the difference."""

    model: nn.Module
    forward: Callable[[], object]
    spoil: Callable[[], object]


def overflow(model: nn.Module) -> Case:
    # The last block's feed-forward, as a run that diverges leaves it: its product passes 65504.
    last = max(
        int(name.split(".")[2]) for name, _ in model.named_modules() if name.startswith("transformer.h.")
    )
    weight = model.get_parameter(f"transformer.h.{last}.mlp.c_proj.weight")
    ids = tokens(1, TOKENS)

    def forward() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            model(input_ids=ids)

    return Case(model, forward, lambda: weight.detach().mul_(3e5))


def no_token(model: nn.Module) -> Case:
    pooled = PooledMean(model.transformer)  # type: ignore[arg-type]
    ids, counts = tokens(2, TOKENS), torch.ones(2, TOKENS)

    def forward() -> None:
        with torch.no_grad():
            pooled(ids, counts)

    return Case(pooled, forward, counts[1].zero_)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    def failing(**watched: object) -> nanwatch.Report:
        with nanwatch.watch(case.model, **watched) as watch:  # type: ignore[arg-type]
            try:
                case.forward()
            except nanwatch.NonFiniteError as error:
                str(error)
                return error.report
        raise AssertionError(f"the model did not fail: {watch.report().to_text()}")

    case.forward()
    plain = [seconds(case.forward) for _ in range(rounds)]
    case.spoil()
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds + 1):
            for name, watched in WAYS.items():
                given = {**watched, "output_dir": folder} if "written" in name else watched
                start = time.perf_counter()
                finding = failing(**given).finding
                if turn:  # the first one imports what is needed
                    times[name].append(time.perf_counter() - start)
    assert finding is not None
    assert finding.operation is not None
    forward_s = statistics.median(plain)
    times_s = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "forward_s": forward_s,
        "times_s": times_s,
        "added_s": times_s["and everything written"] - times_s["first report only"],
        "bound_s": 8 * forward_s + 2,
        "files": len(finding.files),
        "cures": [cure.what for cure in finding.cures if cure.works],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one round of a small model: a smoke test, not a result"
    )
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds

    results = {}
    for make in (overflow, no_token):
        torch.manual_seed(0)
        case = make((small() if options.quick else gpt2()).eval())
        found = results[make.__name__] = measure(case, rounds)
        base, one = found["times_s"]["first report only"], found["forward_s"]
        print(
            table(
                (make.__name__, "time", "added", "in forwards"),
                [
                    (name, f"{t:.2f} s", f"{t - base:.2f} s", f"{(t - base) / one:.1f}")
                    for name, t in [("a forward, finite", one), *found["times_s"].items()]
                ],
            )
        )
        verdict = "pass" if found["added_s"] < found["bound_s"] else "MISS"
        print(f"\nadded {found['added_s']:.2f} s, to stay under {found['bound_s']:.2f} s: {verdict}")
        print(*(f"cure: {what}" for what in found["cures"]), "", sep="\n")
    if options.json:
        write_json(options.json, {"machine": machine(), "cases": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
