"""One forward against decoding with a cache, in a tiny Llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from nanwatch.integrations.decoding import compare_decoding, decoding_gap

TOKENS, SAMPLED = [[5, 9, 12, 7, 20, 3], [8, 4, 4, 30]], [3, 1]


class OffWhenAlone(nn.Module):
    """ReLU, which is 1.5 times as large for a token that is decoded alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() * (1.5 if x.shape[-2] == 1 else 1.0)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def test_a_model_decodes_what_it_reads() -> None:
    """The log-probabilities are those of one forward, and nothing is left in the model or the random state."""
    model = llama()
    state = torch.get_rng_state()
    gap = decoding_gap(model, TOKENS, SAMPLED)
    found = compare_decoding(model, TOKENS, SAMPLED)
    assert gap is not None
    assert (gap.tokens, gap.largest) == (4, pytest.approx(0.0, abs=1e-5))
    assert found.equal
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(x.grad is None for x in model.parameters())


def test_a_fault_in_decoding_is_named_though_a_trainer_has_put_its_own_forward_there() -> None:
    """The copy in float64, whose error is the floor, does not call the original."""
    model = llama()
    model.model.layers[1].mlp.act_fn = OffWhenAlone()
    own = model.forward
    model.forward = lambda **inputs: own(**inputs)
    gap, found = decoding_gap(model, TOKENS, SAMPLED), compare_decoding(model, TOKENS, SAMPLED)
    with torch.no_grad():
        tokens = torch.tensor([TOKENS[0]])
        whole = own(input_ids=tokens).logits[0, 4].double().log_softmax(-1)[3]
        cache = own(input_ids=tokens[:, :3], use_cache=True).past_key_values
        for at in (3, 4):
            alone = own(input_ids=tokens[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = alone.past_key_values
        expected = float(whole - alone.logits[0, 0].double().log_softmax(-1)[3])
    assert gap is not None
    assert gap.largest >= abs(expected) > 1e-3
    assert found.first is not None
    assert found.first.module_a == "model.layers.1.mlp.act_fn"
