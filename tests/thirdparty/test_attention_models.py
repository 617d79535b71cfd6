"""Attention logits of transformers' models: equal to the materialised ones, and the models' numbers unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nanwatch.session.api import watch

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", GROUPED),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", SIZES),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", SIZES),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**SIZES, "alibi": False}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {**SIZES, "image_size": 16, "patch_size": 4}),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}


def make(architecture: str, implementation: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Return a tiny seeded model and arguments of a call, with padding where the model takes it."""
    config_name, model_name, sizes = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**sizes)
    model = getattr(transformers, model_name)._from_config(config, attn_implementation=implementation)
    if architecture == "vit":
        return model, {"pixel_values": torch.randn(2, 3, 16, 16)}
    tokens = torch.randint(3, 64, (2, 9))
    if architecture == "whisper":
        return model, {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    return model, given | ({"decoder_input_ids": tokens} if architecture == "t5" else {})


def materialised(found: list[Tensor]) -> Callable[..., Tensor]:
    """Return `scaled_dot_product_attention` that also adds the largest logit of each head to `found`."""
    original = functional.scaled_dot_product_attention

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        with torch.no_grad():
            scale = kwargs.get("scale")
            scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
            scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
            if attn_mask is not None:
                is_bool = attn_mask.dtype is torch.bool
                scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
            if kwargs.get("is_causal"):
                scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
            found.append(scores.amax(dim=(0, 2, 3)).clamp(min=0))
        return original(q, k, v, attn_mask, *args, **kwargs)

    return attention


def softmax_of(found: list[Tensor]) -> Callable[..., Tensor]:
    """Return `softmax` that also adds the largest score of each head to `found`."""
    original = functional.softmax

    def softmax(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.ndim == 4:
            found.append(torch.stack([x[:, head].max() for head in range(x.shape[1])]).clamp(min=0).detach())
        return original(x, *args, **kwargs)

    return softmax


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_logits_of_a_model_are_the_materialised_ones(
    architecture: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attention module has the largest logits by head, none above the bound. Loss and gradients are bit-equal."""
    if (architecture, implementation) == ("gemma2", "sdpa"):
        pytest.skip("transformers caps the scores of gemma2 in its eager attention alone")
    model, given = make(architecture, implementation)
    model.train()
    random = torch.get_rng_state()
    model(**given).logits.square().mean().backward()
    expected = [None if x.grad is None else x.grad.clone() for x in model.parameters()]
    after = torch.get_rng_state()
    model.zero_grad()

    oracle: list[Tensor] = []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", materialised(oracle))
    monkeypatch.setattr(functional, "softmax", softmax_of(oracle))
    torch.set_rng_state(random)
    with watch(model, attention=True) as w:
        model(**given).logits.square().mean().backward()
        found = w.attention
    assert torch.equal(torch.get_rng_state(), after)
    for x, gradient in zip(model.parameters(), expected, strict=True):
        assert (x.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(x.grad, gradient)

    assert len(found) == len(oracle) >= 2
    for logits, largest in zip(found.values(), oracle, strict=True):
        assert logits.largest == pytest.approx(largest.tolist(), rel=2e-6, abs=1e-7)
        assert bool(logits.bound) == (implementation == "sdpa")
        assert all(bound >= x for bound, x in zip(logits.bound, largest.tolist(), strict=False))
