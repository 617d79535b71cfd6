"""Models of transformers whose training takes tens of megabytes, with inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def gpt2(width: int = 128, rows: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Four layers and so many times 256 tokens: twice, with a width of 128, 64 MB at its peak."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 256, "n_embd": width, "n_layer": 4, "n_head": 4}
    ids = torch.randint(0, 1000, (rows, 256))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, bos_token_id=0, eos_token_id=1, **sizes))
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """Four layers, twice 256 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = torch.randint(0, 1000, (2, 256))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, pad_token_id=None, **sizes))
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    """The size of ResNet-18, four images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", num_labels=10, **shape))
    return model, {"pixel_values": torch.randn(4, 3, 96, 96), "labels": torch.arange(4)}
