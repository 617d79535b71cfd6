"""Values of transformers' models: their labels in records, and the replay of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import replay, write_capsule
from nanwatch.recording.walk import leaves

transformers = pytest.importorskip("transformers")
X, Y = torch.zeros(1), torch.ones(2)


def test_a_cache_is_entered_where_the_call_made_it() -> None:
    """A key-value cache gives its tensors, and is one leaf where it was an argument."""
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    labels = [label for label, x in leaves({"cache": cache}, "output") if isinstance(x, Tensor)]
    assert labels == ["output[cache][layers][0][keys]", "output[cache][layers][0][values]"]
    assert leaves({"cache": cache}, "output", True, [cache]) == [("output[cache]", cache)]


def test_a_block_of_a_transformer_comes_again(tmp_path) -> None:
    """A GPT-2 block with its masks and caches gives the same bits when it is replayed in another model."""
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    folders, blocks = [], []

    def make() -> nn.Module:
        model = transformers.GPT2Model(config).train()
        model.h[1].register_forward_hook(lambda module, args, output: blocks.append(output))
        return model

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        folders.append(write_capsule(tmp_path / "c", module, "h.1", args, kwargs))

    model = make()
    handle = model.h[1].register_forward_pre_hook(take, with_kwargs=True)
    model(torch.arange(10)[None])
    handle.remove()
    with pytest.warns(RuntimeWarning, match=r"DynamicCache.*its default, None"):
        report = replay(folders[0], make)
    first, again = (block[0] if isinstance(block, tuple) else block for block in blocks)
    assert torch.equal(first, again)
    assert report.frames[-1].name == "h.1"
