"""Tiny, seeded models of real architectures, with inputs, for the tests that need more than a toy.

Input and output embeddings are apart in all of them, so that a test can spoil the last module alone.
"""

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

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


@cache
def built(name: str) -> nn.Module:
    """The model of that name, built once from seed 0. Tests that change weights must put them back."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build()
    if name == "t5":
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


def _image(size: int = 8) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 4, 16), "decoder_input_ids": _ids()}


def _model(family: str, kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of transformers from the configuration of its family."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**sizes)
        return getattr(transformers, f"{family}{kind}")(config)

    return build


_LAYERS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
_TOWER = _LAYERS | {"num_hidden_layers": 1}
_UNTIED = {"tie_word_embeddings": False}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 1,
    "num_heads": 2, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_GPT2 = {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
_WHISPER = {
    "num_mel_bins": 4, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 8,
    "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1,
}  # fmt: skip
_CLIP = {
    "text_config": {**_TOWER, **_TEXT, "eos_token_id": 1},
    "vision_config": {**_TOWER, "image_size": 8, "patch_size": 4},
    "projection_dim": 4,
}
_VIT = {"image_size": 8, "patch_size": 4, "num_labels": 3}
_RESNET = {
    "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 3,
}  # fmt: skip
_MAMBA = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 2, "time_step_rank": 2}

ARCHITECTURES = {
    "t5": Architecture(_model("T5", "ForConditionalGeneration", **_T5), _text),
    "gpt2": Architecture(_model("GPT2", "LMHeadModel", vocab_size=VOCABULARY, **_GPT2, **_UNTIED), _text),
    "llama": Architecture(_model("Llama", "ForCausalLM", **_LAYERS, **_TEXT, num_key_value_heads=1), _text),
    "bert": Architecture(_model("Bert", "ForSequenceClassification", **_LAYERS, **_TEXT), _encoder_text),
    "vit": Architecture(_model("ViT", "ForImageClassification", **_LAYERS, **_VIT), _image),
    "resnet": Architecture(_model("ResNet", "ForImageClassification", **_RESNET), lambda: _image(32)),
    "whisper": Architecture(
        _model("Whisper", "ForConditionalGeneration", vocab_size=VOCABULARY, **_WHISPER, **_UNTIED), _speech
    ),
    "mamba": Architecture(_model("Mamba", "ForCausalLM", vocab_size=VOCABULARY, **_MAMBA, **_UNTIED), _text),
    "clip": Architecture(_model("CLIP", "Model", **_CLIP), lambda: {**_encoder_text(), **_image()}),
}
