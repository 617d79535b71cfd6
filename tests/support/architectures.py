"""Tiny, seeded models of real architectures, with inputs, for the tests that need more than a toy.

Input and output embeddings are apart in all of them, so that a test can spoil the last module alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

VOCABULARY = 64
BATCH, LENGTH = 2, 5


@dataclass(frozen=True)
class Architecture:
    """A way to build a model and the keyword arguments of one call."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


@cache
def built(name: str) -> nn.Module:
    """The model of that name, built once from seed 0. Tests that change weights must put them back."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build()
    if name in ("t5", "mt5"):
        # Tied whatever the configuration says.
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def inputs_of(name: str, seed: int) -> dict[str, Any]:
    """Inputs of one call, the same for the same seed."""
    torch.manual_seed(seed)
    return ARCHITECTURES[name].inputs()


def _ids() -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (BATCH, LENGTH))


def _text() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": _ids()}


def _encoder_text() -> dict[str, Any]:
    return {"input_ids": _ids(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(_t5_config(T5Config, "relu"))


def _mt5() -> nn.Module:
    from transformers import MT5Config, MT5ForConditionalGeneration

    return MT5ForConditionalGeneration(_t5_config(MT5Config, "gated-gelu"))


def _t5_config(kind: Any, feed_forward: str) -> Any:
    return kind(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=2,
        feed_forward_proj=feed_forward,
        decoder_start_token_id=0,
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=8,
            patch_size=4,
            num_labels=3,
        )
    )


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3)
    )


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8)}


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=4,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_source_positions=8,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
            decoder_start_token_id=1,
            tie_word_embeddings=False,
        )
    )


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 4, 16), "decoder_input_ids": _ids()}


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            state_size=4,
            num_hidden_layers=2,
            conv_kernel=2,
            time_step_rank=2,
            tie_word_embeddings=False,
        )
    )


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return CLIPModel(
        CLIPConfig(
            text_config={**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 1},
            vision_config={**tower, "image_size": 8, "patch_size": 4},
            projection_dim=4,
        )
    )


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("t5", _t5, _text),
        Architecture("mt5", _mt5, _text),
        Architecture("gpt2", _gpt2, _text),
        Architecture("llama", _llama, _text),
        Architecture("bert", _bert, _encoder_text),
        Architecture("vit", _vit, _image),
        Architecture("resnet", _resnet, lambda: {"pixel_values": torch.randn(BATCH, 3, 32, 32)}),
        Architecture("whisper", _whisper, _speech),
        Architecture("mamba", _mamba, _text),
        Architecture("clip", _clip, lambda: {**_encoder_text(), **_image()}),
    )
}
