"""Measure what the audit of steps adds to a training on a CPU: the CPU time of one audit, and its share of 100 steps.

    python benchmarks/bench_updates.py [AUDITS]      # one to three minutes

A GPT-2 of 6 layers trains with AdamW on one thread and `updates=5`. A step that is audited is compared with the steps
two before and two after it, which are not. CPU time counts, and of all audits after a warm-up the median, as the
machine may be busy.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

import nanwatch

_EVERY, _WARM_UP = 5, 10


def gpt2() -> nn.Module:
    """Return a GPT-2 that makes a step of 4x96 tokens in about 100 ms on a free core."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": 8192}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def seconds(model: nn.Module, num_steps: int) -> list[float]:
    """Return the CPU seconds of each step."""
    ids = torch.randint(8192, (4, 96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    with nanwatch.watch(model, updates=_EVERY, black_box=False) as watch:
        for _ in range(num_steps):
            begun = time.process_time()
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            found.append(time.process_time() - begun)
    assert watch.updates == ()
    return found


def main() -> None:
    """Print the medians."""
    audits = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spent = seconds(gpt2(), _WARM_UP + _EVERY * audits + 2)
    places = range(_WARM_UP - 1, len(spent) - 2, _EVERY)
    plain = [(spent[place - 2] + spent[place + 2]) / 2 for place in places]
    more = [spent[place] / other - 1 for place, other in zip(places, plain, strict=True)]
    share, step = statistics.median(more), statistics.median(plain)
    print(f"a step takes {1e3 * step:.0f} ms, and {share:.1%} more where it is audited: {len(more)} audits")
    print(f"on average {share / 100:.3%} at N=100")


if __name__ == "__main__":
    main()
