"""How long a failure takes to explain: from the call that fails to the exception with the whole report.

    python benchmarks/bench_rerun.py
    python benchmarks/bench_rerun.py --quick     a small model and one round: shows that it runs

Two failures of a GPT-2 124M from its real configuration with seeded weights, each of 8 tokens: the last feed-forward
overflows under fp16 autocast, which a wider format cures, and a mean over no token divides by zero in float32, which a
change of the source cures. Timed, in turn and in one process: a forward that does not fail; the failing one with the
first report only (`rerun=False`); with the second run and the cures; and with the files written too. The added
time is that over the first kind of failing call, and is to stay under eight forwards and two seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from _steps import gpt2, tokens
from _timing import table
from torch import Tensor, nn

import nanwatch

Case = tuple[nn.Module, Callable[[], object], Callable[[], object]]  # the model, its forward, what spoils it
TOKENS = 8
WAYS: dict[str, dict[str, Any]] = {
    "first report only": {"rerun": False},
    "second run and cures": {},
    "and everything written": {"output_dir": None},  # a temporary folder
}


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


def overflow(model: Any) -> Case:
    """The last block's feed-forward, as a run that diverges leaves it: its product passes 65504."""
    weight, ids = model.transformer.h[-1].mlp.c_proj.weight, tokens(1, TOKENS)

    def forward() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            model(input_ids=ids)

    return model, forward, lambda: weight.detach().mul_(3e5)


def no_token(model: Any) -> Case:
    pooled = PooledMean(model.transformer)
    ids, counts = tokens(2, TOKENS), torch.ones(2, TOKENS)

    def forward() -> None:
        with torch.no_grad():
            pooled(ids, counts)

    return pooled, forward, counts[1].zero_


def explain(model: nn.Module, forward: Callable[[], object], **watched: Any) -> Any:
    """Return the finding of a forward that fails."""
    with nanwatch.watch(model, **watched):
        try:
            forward()
        except nanwatch.NonFiniteError as error:
            str(error)
            return error.report.finding
    raise AssertionError("the model did not fail")


def measure(case: Case, rounds: int) -> tuple[dict[str, float], list[str]]:
    """Return the median seconds of a forward that ends well and of each way, and the cures that work."""
    model, forward, spoil = case
    times: dict[str, list[float]] = {name: [] for name in ("a forward, finite", *WAYS)}

    def clock(name: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = call()
        times[name].append(time.perf_counter() - begun)
        return result

    forward()
    for _ in range(rounds):
        clock("a forward, finite", forward)
    spoil()
    with tempfile.TemporaryDirectory() as folder:
        explain(model, forward, output_dir=folder)  # imports what is needed
        for _ in range(rounds):
            for name, options in WAYS.items():
                given = {option: value if option == "rerun" else folder for option, value in options.items()}
                finding = clock(name, lambda given=given: explain(model, forward, **given))
    cures = [cure.what for cure in finding.cures if cure.works]
    return {name: statistics.median(taken) for name, taken in times.items()}, cures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    for make in (overflow, no_token):
        torch.manual_seed(0)
        case = make((small() if options.quick else gpt2()).eval())
        seconds, cures = measure(case, 1 if options.quick else options.rounds)
        plain, first, *_, whole = seconds.values()
        rows = [
            (way, f"{t:.2f} s", f"{t - first:.2f} s", f"{(t - first) / plain:.1f}")
            for way, t in seconds.items()
        ]
        print(table((make.__name__, "time", "added", "in forwards"), rows))
        added, bound = whole - first, 8 * plain + 2
        print(f"\nadded {added:.2f} s, to stay under {bound:.2f} s: {'pass' if added < bound else 'MISS'}")
        print(*(f"cure: {what}" for what in cures), "", sep="\n")


if __name__ == "__main__":
    main()
