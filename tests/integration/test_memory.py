"""The memory that watching takes from torch's allocator: nothing but copies of the random state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.numerics import _extension
from support.allocated import allocated
from support.watching import watch

ROOM = 16 * 1024  # for copies of the state of the random numbers, 5,056 bytes each
# The fallback reads with PyTorch's operations, whose results lie in PyTorch's memory while they are needed: 3.6 MB.
READING = 0 if _extension.C is not None else 4 * 2**20


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Four layers and twice 256 tokens: 64 MB at its peak."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 256, "n_embd": 128, "n_layer": 4, "n_head": 4}
    ids = torch.randint(0, 1000, (2, 256))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, bos_token_id=0, eos_token_id=1, **sizes))
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def peak_of(watched: bool, **options: Any) -> tuple[int, int]:
    """Return the peak of two training steps, after a first one that made the optimizer's state."""
    torch.manual_seed(0)
    model, inputs = gpt2()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watcher = watch(model, **options) if watched else None

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = allocated(lambda: (step(), step()))
    if watcher is not None:
        assert watcher.batch == 2
        watcher.stop()
    return peak


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_peak_of_what_torch_allocates_is_the_same(gradients: bool) -> None:
    """Forward, backward and step of a model of tens of megabytes: the random state is all that comes on top."""
    plain, watched = peak_of(watched=False), peak_of(watched=True, gradients=gradients)
    assert plain[0] > 20 * 2**20
    assert abs(watched[0] - plain[0]) <= ROOM + READING
    assert watched[0] <= 1.01 * plain[0] + READING
    assert watched[1] - plain[1] <= ROOM
