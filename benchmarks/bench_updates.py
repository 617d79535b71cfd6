"""Measure what the audit of steps adds to a training on a CPU: the CPU time of one audit, and its share of 100 steps.

    python benchmarks/bench_updates.py [ROUNDS]      # about three minutes

A GPT-2 of 6 layers trains with AdamW on one thread, in turns of 20 steps: watched, and watched with `updates=10`. Five
of the 20 are audited: 1, 2, 3, 10 and 20. An audit costs a fifth of what the second turn takes more, with all that is
gathered for it. The median over the rounds counts, in CPU time, as the machine may be busy.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from _steps import causal_training
from torch import nn

import nanwatch

_STEPS, _AUDITS = 20, 5


def gpt2() -> nn.Module:
    """Return a GPT-2 that makes a step of 4x64 tokens in about 150 ms on a free core."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": 30000}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def turn(model: nn.Module, updates: int | None) -> float:
    """Return the CPU seconds of a turn."""
    step = causal_training(4, 64)(model)
    with nanwatch.watch(model, updates=updates or False, black_box=False) as watch:
        begun = time.process_time()
        for _ in range(_STEPS):
            step()
        spent = time.process_time() - begun
    assert watch.updates == ()
    return spent


def main() -> None:
    """Print the medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt2()
    turn(model, 10)
    plain, audits = [], []
    for number in range(rounds):
        spent = {updates: turn(model, updates) for updates in ((None, 10), (10, None))[number % 2]}
        plain.append(spent[None] / _STEPS)
        audits.append((spent[10] - spent[None]) / _AUDITS)
    step, audit = statistics.median(plain), statistics.median(audits)
    print(f"a step {1e3 * step:.1f} ms, an audit {1e3 * audit:.2f} ms more ({audit / step:.1%} of a step)")
    print(
        f"at N=100, {audit / step / 100:.3%} of a step on average; rounds from {1e3 * min(audits):.2f} to",
        end=" ",
    )
    print(f"{1e3 * max(audits):.2f} ms")


if __name__ == "__main__":
    main()
