"""Small models of many makes, each with the arguments of a call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Built: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

# Names of configurations of transformers. One set of sizes fits nearly all texts, as each takes those that it knows.
_TEXT = (
    "albert bert bloom cohere deberta-v2 distilbert electra ernie gemma gpt2 gpt_neo gpt_neox granite llama mamba mbart"
    " mistral mixtral mpnet olmo opt phi qwen2 qwen2_moe roberta roformer stablelm starcoder2 t5 xlm-roberta"
)  # fmt: skip
# fmt: off
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "d_ff", "rotary_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "state_size"), 8),
    "vocab_size": 99, "pad_token_id": 0, "word_embed_proj_dim": 32, "use_cache": False, "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "attention_types": [[["global", "local"], 1]],
}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2}
_PATCHES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}
_IMAGE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("vit", "beit", "deit", "dinov2"), _PATCHES),
    "swin": {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "convnext": {**_STAGES, "num_stages": 2},
    "resnet": {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 8, "layer_type": "y"},
    "segformer": {**_STAGES, "num_attention_heads": [1, 2]},
    "poolformer": _STAGES,
}
# fmt: on


def _transformers(kind: str) -> Built:
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_config(AutoConfig.for_model(kind, **_IMAGE.get(kind, _SIZES))).eval()
    if kind in _IMAGE:
        return model, (torch.randn(2, 3, 32, 32),), {}
    ids = torch.arange(4, 16).view(2, 6)
    return model, (), {"input_ids": ids, **({"decoder_input_ids": ids} if kind in ("t5", "mbart") else {})}


def _timm(kind: str) -> Built:
    import timm

    return timm.create_model(kind, num_classes=5).eval(), (torch.randn(1, 3, 224, 224),), {}


def _torchvision(kind: str) -> Built:
    import torchvision

    return torchvision.models.get_model(kind, num_classes=5).eval(), (torch.randn(1, 3, 64, 64),), {}


class Gated(nn.Module):
    """Owner of parameters that its children's values meet first, and of modules that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.gate, self.scales = nn.Parameter(torch.ones(8)), nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.tables = nn.ParameterDict({"shift": torch.zeros(8)})
        self.mixer, self.block = nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), 1, 8), x - self.mean], 1) + self.position
        h = h + self.block(h * self.scales[0]) * self.gate
        h = nn.functional.linear(h, self.mixer.weight, self.mixer.bias)
        result: Tensor = self.block(h * self.scales[1] + self.tables["shift"])
        return result


class Experts(nn.Module):
    """Stacked weights of experts, beside a router, and an attention that is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.attention = nn.Linear(8, 4), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 3), nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.attention(query=x, key=x, value=x)
        weights = self.router(h).softmax(-1)
        h = torch.einsum("btd,edo,eoi,bte->bti", h, self.up, self.down, weights)
        result: Tensor = self.cell(input=h[:, 0], hx=h[:, -1])
        return result


def _torch() -> dict[str, Callable[[], Built]]:
    rows, series, image = torch.randn(4, 8), torch.randn(2, 5, 8), torch.randn(2, 4, 12, 12)
    # fmt: off
    made: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
        "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.PReLU(), nn.Linear(8, 2)).eval(), (rows,)),
        "mlp in training": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), (rows,)),
        "convolutions": (lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 3), nn.InstanceNorm2d(4, affine=True)
        ), (image,)),
        "lstm": (lambda: nn.LSTM(8, 8, 2, bidirectional=True, batch_first=True), (series,)),
        "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (series, series)),
        "encoder, fast path": (lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval(), (series,)),
        "bilinear": (lambda: nn.Bilinear(8, 8, 3), (rows, rows)),
        "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 8), nn.RMSNorm(8), nn.Linear(8, 2)),
                          (torch.arange(8).view(2, 4),)),
        "gated": (Gated, (torch.randn(3, 4, 8),)),
        "experts": (Experts, (series,)),
        "parametrized": (lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(8, 8)), parametrizations.spectral_norm(nn.Linear(8, 8)),
            nn.GELU(), parametrizations.orthogonal(nn.Linear(8, 8))), (rows,)),
    }
    # fmt: on
    return {name: lambda build=build, args=args: (build(), args, {}) for name, (build, args) in made.items()}


ARCHITECTURES: dict[str, Callable[[], Built]] = _torch()
for _package, _build, _kinds in (
    ("transformers", _transformers, [*_TEXT.split(), *_IMAGE]),
    ("timm", _timm, ["vit_tiny_patch16_224", "mixer_s32_224", "resnet18"]),
    ("torchvision", _torchvision, ["resnet18", "mobilenet_v3_small", "squeezenet1_1"]),
):
    if importlib.util.find_spec(_package) is not None:
        for _kind in _kinds:
            ARCHITECTURES[f"{_package} {_kind}"] = lambda kind=_kind, build=_build: build(kind)  # type: ignore[misc]
