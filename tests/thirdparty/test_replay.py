"""`replay` of a block of a transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nanwatch import replay, write_capsule


def test_a_block_of_a_transformer_comes_again(tmp_path):
    """A GPT-2 block with its masks and caches gives the same bits when it is replayed in another model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)

    def make() -> nn.Module:
        return transformers.GPT2Model(config).train()

    model, calls = make(), []

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        folder = write_capsule(tmp_path / "c", module, "h.1", args, kwargs)
        calls.append(folder)

    outputs: list[Any] = []
    model.h[1].register_forward_pre_hook(take, with_kwargs=True)
    model.h[1].register_forward_hook(lambda module, args, output: outputs.append(output))
    model(torch.arange(10)[None])
    other = make()
    other.h[1].register_forward_hook(lambda module, args, output: outputs.append(output))
    with pytest.warns(RuntimeWarning, match=r"DynamicCache.*its default, None"):
        report = replay(calls[0], lambda: other)
    first, again = (one[0] if isinstance(one, tuple) else one for one in outputs)
    assert torch.equal(first, again)
    assert report.frames[-1].name == "h.1"
