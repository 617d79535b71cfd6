"""Faults planted in vLLM's model once it has its weights, for judge_engine.py. Each is in layer 1 unless it says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _layer(model: Any) -> Any:
    return model.model.layers[1]


def rotary_base(model: Any) -> None:
    """Change the base of the rotary embedding that all layers share."""
    rotary = _layer(model).self_attn.rotary_emb
    rotary.base = 5000.0
    with torch.no_grad():
        rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache())


def eps(model: Any) -> None:
    _layer(model).input_layernorm.variance_epsilon = 1e-2


def scale(model: Any) -> None:
    _layer(model).self_attn.attn.impl.scale *= 1.1


def softcap(model: Any) -> None:
    _layer(model).self_attn.attn.impl.logits_soft_cap = 1.0


def final_softcap(model: Any) -> None:
    model.logits_processor.soft_cap = 5.0


def window(model: Any) -> None:
    _layer(model).self_attn.attn.impl.sliding_window = 3


def gate_and_up(model: Any) -> None:
    weight = _layer(model).mlp.gate_up_proj.weight
    with torch.no_grad():
        weight.copy_(torch.cat(weight.chunk(2)[::-1]))


def key_and_value(model: Any) -> None:
    one = _layer(model).self_attn.qkv_proj
    q, k, v = one.weight.clone().split(one.output_sizes)
    with torch.no_grad():
        one.weight.copy_(torch.cat([q, v, k]))


def stale_weight(model: Any) -> None:
    weight = _layer(model).mlp.down_proj.weight
    with torch.no_grad():
        weight.add_(
            torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)).to(weight), alpha=1e-3
        )


def norm_dtype(model: Any) -> None:
    norm = _layer(model).post_attention_layernorm
    forward = norm.forward

    def in_bfloat16(x: Any, residual: Any = None) -> Any:
        found = forward(x, residual)
        return (found[0].bfloat16().to(x.dtype), *found[1:]) if isinstance(found, tuple) else found

    norm.forward = in_bfloat16


def no_query_norm(model: Any) -> None:
    nn.init.ones_(_layer(model).self_attn.q_norm.weight)


def embedding_scale(model: Any) -> None:
    """Before the first layer."""
    model.model.normalizer.fill_(7.0)


def stale_word(model: Any) -> None:
    """A row of the embedding that no prompt reads."""
    with torch.no_grad():
        model.model.embed_tokens.weight[255] += 1


def positions_from_zero(model: Any) -> None:
    """Count the positions of each part of a prompt from 0: wrong in a later chunk, and behind a cached part."""
    rotary = _layer(model).self_attn.rotary_emb
    forward = rotary.forward

    def from_zero(positions: Any, *args: Any) -> Any:
        is_start = torch.ones_like(positions, dtype=torch.bool)
        is_start[1:] = positions.diff() != 1
        part = is_start.cumsum(0) - 1
        is_prefill = part.bincount()[part] > 1
        return forward(positions - is_prefill * positions[is_start][part], *args)

    rotary.forward = from_zero


def rows_of_a_batch(model: Any) -> None:
    """Make the rows of a decode of several requests 1 % larger."""
    norm = _layer(model).post_attention_layernorm
    forward = norm.forward

    def batched(x: Any, residual: Any = None) -> Any:
        found = forward(x, residual)
        return (found[0] * 1.01, *found[1:]) if 1 < len(x) <= 8 else found

    norm.forward = batched
