"""Faults planted between transformers' models and other implementations, and the module that compare has to name.

Engines: ours (_engine_models.py), and litgpt and timm, which `make test-all` puts into a folder of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import _engine_models
import torch
from torch import nn

VOCABULARY = 97
LENGTH = 12


class Planted(NamedTuple):
    """Fault of an engine: how to plant it, and the path of the right module in transformers' model."""

    engine: str
    name: str
    plant: Any
    right: str


def seeded(model: nn.Module) -> nn.Module:
    """Give each weight random numbers of usual size, so that each part matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            size = 0.2 if x.ndim == 1 else x.shape[-1] ** -0.5
            is_scale = x.ndim == 1 and name.endswith("weight")
            x.copy_(torch.randn(x.shape, generator=generator) * size + is_scale)
    return model.eval()


@cache
def reference(name: str) -> nn.Module:
    """Return transformers' model. Tests must not change it."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, "tie_word_embeddings": False}
    if name == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, **heads, **sizes
        )
        return seeded(transformers.LlamaForCausalLM(config))
    if name == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        config = transformers.GPT2Config(n_positions=32, n_embd=32, n_layer=3, n_head=4, **ends, **sizes)
        return seeded(transformers.GPT2LMHeadModel(config))
    image = {"image_size": 16, "patch_size": 4, "num_labels": 5, "layer_norm_eps": 1e-6}
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, **image
    )
    return seeded(transformers.ViTForImageClassification(config))


def inputs_of(name: str) -> torch.Tensor:
    """Return what the model is called with."""
    generator = torch.Generator().manual_seed(3)
    if name == "vit":
        return torch.randn(2, 3, 16, 16, generator=generator)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


@cache
def make_importable() -> None:
    """Let litgpt and timm be imported from the folder into which `make test-all` puts them.

    PyPI's torchvision, which timm imports, has its operators compiled for CUDA. Beside a CPU build of PyTorch they do
    not load, and then its import fails where it registers fakes of two, which timm's models do not use.
    """
    sys.path.append(str(Path(sys.prefix, "engines")))
    with suppress(ImportError):
        try:
            import_module("torchvision")
        except RuntimeError:
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
            import_module("torchvision")


def litgpt(**change: Any) -> nn.Module:
    """Return litgpt's Llama with the reference's weights."""
    from litgpt.config import Config
    from litgpt.model import GPT

    other: Any = reference("llama")
    sizes = {"n_layer": 3, "n_head": 4, "n_query_groups": 2, "n_embd": 32, "intermediate_size": 48}
    sizes |= {"block_size": 32, "padded_vocab_size": VOCABULARY, "vocab_size": VOCABULARY, "head_size": 8}
    kinds = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "norm_eps": 1e-6, "bias": False}
    rotary = {"rotary_percentage": 1.0, "rope_base": 10000, "parallel_residual": False}
    model = GPT(Config(**{"name": "x", **sizes, **kinds, **rotary, **change})).eval()
    parts = model.transformer
    pairs = [
        (model.lm_head, other.lm_head),
        (parts.wte, other.model.embed_tokens),
        (parts.ln_f, other.model.norm),
    ]
    with torch.no_grad():
        for mine, block in zip(parts.h, other.model.layers, strict=True):
            attention = block.self_attn
            qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            mine.attn.qkv.weight.copy_(torch.cat(qkv))
            pairs += [(mine.norm_1, block.input_layernorm), (mine.norm_2, block.post_attention_layernorm)]
            pairs += [(mine.attn.proj, attention.o_proj), (mine.mlp.fc_1, block.mlp.gate_proj)]
            pairs += [(mine.mlp.fc_2, block.mlp.up_proj), (mine.mlp.proj, block.mlp.down_proj)]
        for one, theirs in pairs:
            one.weight.copy_(theirs.weight)
    return model


def edited(edit: Callable[[Any], object]) -> nn.Module:
    """Return litgpt's Llama with a change of its weights."""
    model: Any = litgpt()
    with torch.no_grad():
        edit(model)
    return model


def swap(one: nn.Linear, other: nn.Linear) -> None:
    """Exchange two weights."""
    kept = one.weight.clone()
    one.weight.copy_(other.weight)
    other.weight.copy_(kept)


def timm(**change: Any) -> nn.Module:
    """Return timm's vision transformer with the reference's weights."""
    from timm.models.vision_transformer import VisionTransformer

    other: Any = reference("vit")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "mlp_ratio": 2}
    model = VisionTransformer(**{**sizes, "num_classes": 5, **change}).eval()
    start = other.vit.embeddings
    pairs = [(model.patch_embed.proj, start.patch_embeddings.projection)]
    pairs += [(model.norm, other.vit.layernorm), (model.head, other.classifier)]
    with torch.no_grad():
        model.cls_token.copy_(start.cls_token)
        if model.pos_embed is not None:
            model.pos_embed.copy_(start.position_embeddings)
        for mine, block in zip(model.blocks, other.vit.layers, strict=True):
            qkv = [block.attention.q_proj, block.attention.k_proj, block.attention.v_proj]
            mine.attn.qkv.weight.copy_(torch.cat([one.weight for one in qkv]))
            if mine.attn.qkv.bias is not None:
                mine.attn.qkv.bias.copy_(torch.cat([one.bias for one in qkv]))
            pairs += [(mine.norm1, block.layernorm_before), (mine.norm2, block.layernorm_after)]
            pairs += [(mine.attn.proj, block.attention.o_proj)]
            pairs += [(mine.mlp.fc1, block.mlp.fc1), (mine.mlp.fc2, block.mlp.fc2)]
        for one, theirs in pairs:
            one.weight.copy_(theirs.weight)
            one.bias.copy_(theirs.bias)
    return model


def engine(planted: Planted) -> tuple[str, nn.Module]:
    """Return the name of the reference and the engine with the fault."""
    if planted.engine in ("llama", "gpt2"):
        build = _engine_models.Llama if planted.engine == "llama" else _engine_models.GPT2
        return planted.engine, build(reference(planted.engine), planted.plant).eval()
    build = litgpt if planted.engine == "litgpt" else timm
    model = build(**planted.plant) if isinstance(planted.plant, dict) else edited(planted.plant)
    return ("llama" if planted.engine == "litgpt" else "vit"), model


_BLOCK = "model.layers.1"
_IN_OURS = {
    f"{_BLOCK}.self_attn": (
        "rope base",
        "rotary dimension",
        "interleaved rope",
        "rope sign",
        "positions from one",
        "key groups",
        "scores by size",
        "mask off by one",
        "mask without self",
        "no mask",
        "window",
        "softmax in bf16",
    ),
    f"{_BLOCK}.input_layernorm": ("eps", "norm in bf16", "L1 norm", "norm weight plus one"),
    f"{_BLOCK}.mlp": ("gate and up swapped", "another activation", "accumulation in bf16"),
    f"{_BLOCK}.mlp.down_proj": ("a row of a weight lost",),
    _BLOCK: ("norm order", "residual after norm", "parallel residual", "residual scale"),
    "lm_head": ("tied head",),
    "model": ("embedding scale",),
}
_LAYER = "transformer.h.1"
_IN_GPT2 = {
    "eps": f"{_LAYER}.ln_2",
    "missing bias": f"{_LAYER}.attn.c_proj",
    "heads mixed up": f"{_LAYER}.attn",
    "exact gelu": f"{_LAYER}.mlp",
    "positions from two": "transformer",  # computes them itself
    "no final norm": "",
}
_FIRST = "model.layers.0"
_IN_LITGPT: dict[str, tuple[Any, str]] = {
    "rope base": ({"rope_base": 500}, f"{_FIRST}.self_attn"),
    "rotary dimension": ({"rotary_percentage": 0.5}, f"{_FIRST}.self_attn"),
    "rope condensed": ({"rope_condense_ratio": 2}, f"{_FIRST}.self_attn"),
    "eps": ({"norm_eps": 1e-3}, f"{_FIRST}.input_layernorm"),
    "score scale": ({"attention_scores_scalar": 16}, f"{_FIRST}.self_attn"),
    "score cap": ({"attention_logit_softcapping": 2.0}, f"{_FIRST}.self_attn"),
    "window": ({"sliding_window_size": 4, "sliding_window_indices": [1] * 3}, f"{_FIRST}.self_attn"),
    "parallel residual": ({"parallel_residual": True}, _FIRST),
    "gelu for silu": ({"mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh"}, f"{_FIRST}.mlp"),
    "embedding scale": ({"scale_embeddings": True}, "model"),
    "logit cap": ({"final_logit_softcapping": 3.0}, ""),
    "gate and up swapped": (
        lambda m: swap(m.transformer.h[1].mlp.fc_1, m.transformer.h[1].mlp.fc_2),
        f"{_BLOCK}.mlp",
    ),
    "norms swapped": (lambda m: swap(m.transformer.h[1].norm_1, m.transformer.h[1].norm_2), _BLOCK),
    "layers swapped": (
        lambda m: swap(m.transformer.h[1].attn.proj, m.transformer.h[2].attn.proj),
        f"{_BLOCK}.self_attn",
    ),
    "norm weight plus one": (
        lambda m: setattr(m.transformer.h[1].norm_1, "add_unit_offset", True),
        f"{_BLOCK}.input_layernorm",
    ),
    "tied head": (lambda m: m.lm_head.weight.copy_(m.transformer.wte.weight), "lm_head"),
}
_VIT = "vit.layers.0"
_IN_TIMM: dict[str, tuple[Any, str]] = {
    "eps": ({"norm_layer": partial(nn.LayerNorm, eps=1e-3)}, f"{_VIT}.layernorm_before"),
    "gelu by tanh": ({"act_layer": partial(nn.GELU, approximate="tanh")}, f"{_VIT}.mlp.activation_fn"),
    "missing bias": (
        {"qkv_bias": False},
        ", ".join(f"{_VIT}.attention.{part}" for part in ("q_proj", "k_proj", "v_proj")),
    ),
    "no positions": ({"pos_embed": "none"}, "vit.embeddings"),
    "mean for class token": ({"global_pool": "avg", "fc_norm": False}, ""),
    "norms of q and k": ({"qk_norm": True}, f"{_VIT}.attention"),
}
PLANTED = [
    *(Planted("llama", name, name, right) for right, names in _IN_OURS.items() for name in names),
    *(Planted("gpt2", name, name, right) for name, right in _IN_GPT2.items()),
    *(Planted("litgpt", name, plant, right) for name, (plant, right) in _IN_LITGPT.items()),
    *(Planted("timm", name, plant, right) for name, (plant, right) in _IN_TIMM.items()),
]
