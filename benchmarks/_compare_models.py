"""Small models with seeded weights for judge_compare.py: transformers' families, and modules written by hand.

A change is a subclass that takes the place of a module's class. A closure over the module would call the original in
the copies that `nanwatch.compare` makes.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, LENGTH = 97, 12
SEED = 0  # of all weights and inputs
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
_DECODER = {
    **_SIZES,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "use_cache": False,
    "tie_word_embeddings": False,
}
_GPT2 = {"n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


def _transformer(name: str) -> nn.Module:
    t: Any = transformers
    heads = {"head_dim": 16}
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**_DECODER))
    if name == "mistral":
        return t.MistralForCausalLM(t.MistralConfig(**_DECODER, **heads, sliding_window=None))
    if name == "qwen2":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**_DECODER))
    if name == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**_DECODER, **heads))
    if name == "gemma":
        return t.GemmaForCausalLM(t.GemmaConfig(**_DECODER, **heads))
    if name == "gemma2":
        # Eager, which alone knows the cap.
        config = t.Gemma2Config(
            **_DECODER, **heads, query_pre_attn_scalar=16, sliding_window=8, attn_implementation="eager"
        )
        return t.Gemma2ForCausalLM(config)
    if name == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(**_GPT2, vocab_size=VOCABULARY, use_cache=False))
    if name == "bert":
        return t.BertForMaskedLM(
            t.BertConfig(**_SIZES, vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0)
        )
    if name == "t5":
        return t.T5ForConditionalGeneration(t.T5Config(**_T5, vocab_size=VOCABULARY, use_cache=False))
    image = {"image_size": 16, "patch_size": 4, "num_labels": 5}
    return t.ViTForImageClassification(t.ViTConfig(**_SIZES, **image, layer_norm_eps=1e-6))


class Norm(nn.Module):
    """RMS norm. With `plus` its weight is counted from one."""

    def __init__(self, width: int, eps: float = 1e-6, plus: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.plus = eps, plus

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * (self.weight + self.plus)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys, written out."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2, base: float = 10000.0) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.base = heads, groups, width // heads, base
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.size, bias=False)
        self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.scale, self.cap, self.window, self.shift, self.repeats = self.size**-0.5, 0.0, 0, 0, False

    def split(self, x: Tensor) -> list[Tensor]:
        both = ((self.wq, self.heads), (self.wk, self.groups), (self.wv, self.groups))
        return [part(x).unflatten(-1, (n, self.size)).transpose(1, 2) for part, n in both]

    def angles(self, length: int) -> Tensor:
        inverse = self.base ** -(torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        return torch.arange(length, dtype=torch.float64)[:, None] * inverse

    def turned(self, x: Tensor, shift: int = 0) -> Tensor:
        angles = self.angles(x.shape[-2] + shift)[shift:]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def repeated(self, x: Tensor) -> Tensor:
        many = self.heads // self.groups
        return x.repeat(1, many, 1, 1) if self.repeats else x.repeat_interleave(many, 1)

    def weighted(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if self.window:
            seen = seen.triu(1 - self.window)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = self.turned(q), self.turned(k, self.shift)
        k, v = self.repeated(k), self.repeated(v)
        return self.wo(self.weighted(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, width: int = 64, inner: int = 96) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward with norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.mix, self.n2, self.feed = Norm(64), Attention(), Norm(64), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.n1(x))
        return x + self.feed(self.n2(x))


class Plain(nn.Module):
    """Decoder written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = Norm(64), nn.Linear(64, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)
    )  # fmt: skip


_OWN: dict[str, Callable[[], nn.Module]] = {"plain": Plain, "conv": _convolutions, "mlp": _perceptron}


def build(name: str) -> nn.Module:
    """Return a model. `name` is a family, and with "+" at its end all weights are random and of usual size.

    Without it they are as the family initialises them: most attention scores are near zero, all biases are zero.
    """
    torch.manual_seed(SEED)
    family = name.rstrip("+")
    model = _OWN[family]() if family in _OWN else _transformer(family)
    if name.endswith("+"):
        generator = torch.Generator().manual_seed(SEED + 1)
        with torch.no_grad():
            for path, x in model.named_parameters():
                size = 0.2 if x.ndim == 1 else x[0].numel() ** -0.5
                size = 1.0 if "embed" in path or "words" in path or "shared" in path else size
                is_scale = x.ndim == 1 and path.endswith("weight") and not family.startswith("gemma")
                x.copy_(torch.randn(x.shape, generator=generator) * size + is_scale)
    return model.eval()


def inputs_of(name: str) -> dict[str, Tensor] | Tensor:
    """Return what the model is called with, in float32 where it has floats."""
    generator = torch.Generator().manual_seed(SEED + 3)
    family = name.rstrip("+")
    if family in ("vit", "conv"):
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels} if family == "vit" else pixels
    if family == "mlp":
        return torch.randn(2, 6, 32, generator=generator)
    ids = torch.randint(1, VOCABULARY - 7, (2, LENGTH), generator=generator)  # the last words are never used
    if family == "plain":
        return ids
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, :7]} if family == "t5" else {})}


def become(module: nn.Module, **methods: Any) -> None:
    """Give a module methods of its own, which its copies have too."""
    own = type(module)
    module.__class__ = type(own.__name__, (own,), dict(methods))


def rotary(base: float) -> Callable[..., Any]:
    """Return an attention's forward with a rotary base of its own, for transformers' decoders."""

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any = None, **rest: Any) -> Any:
        size, length = self.head_dim, hidden_states.shape[1]
        angles = torch.arange(length)[:, None] * base ** -(torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], -1)[None]
        given = tuple(x.to(hidden_states.dtype) for x in (angles.cos(), angles.sin()))
        return super(type(self), self).forward(hidden_states, position_embeddings=given, **rest)

    return forward


def with_forward(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that gives its module, its own forward and its arguments to a function."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(types.MethodType(type(self).__mro__[1].forward, self), *args, **kwargs)

    return forward


def at(model: nn.Module, path: str) -> Any:
    """Return a module by its path."""
    return model.get_submodule(path)


def gelu_by_parts(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def set_weight(path: str, change: Callable[[Tensor], Any]) -> Callable[[Any], object]:
    """Return what changes a parameter of a model."""

    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            parameter = model.get_parameter(path)
            parameter.copy_(change(parameter.clone()))

    return plant


def set_values(path: str, **values: Any) -> Callable[[Any], object]:
    """Return what sets attributes of a module."""

    def plant(model: nn.Module) -> None:
        for name, value in values.items():
            setattr(at(model, path), name, value)

    return plant


def set_forward(path: str, change: Callable[..., Any]) -> Callable[[Any], object]:
    """Return what gives a module another forward: `change` of its own and the arguments."""

    return lambda model: become(at(model, path), forward=with_forward(change))


def swap(one: str, other: str) -> Callable[[Any], object]:
    """Return what exchanges two parameters."""

    def plant(model: nn.Module) -> None:
        a, b = model.get_parameter(one), model.get_parameter(other)
        a.data, b.data = b.data, a.data

    return plant
