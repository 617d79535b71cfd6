"""Faults for judge_compare.py: what is changed in a copy of a model, and the modules that may be named for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _compare_models import (
    LENGTH,
    at,
    become,
    rotary,
    set_forward,
    set_values,
    set_weight,
    swap,
    with_forward,
)
from torch import Tensor, nn


class Fault(NamedTuple):
    """Fault of a copy of a model: `plant` changes the copy, `right` are the paths of A that are right answers.

    `call` is how the copy is called, where that is the fault.
    """

    model: str
    name: str
    right: tuple[str, ...]
    plant: Callable[[Any], object] = lambda model: None
    call: Callable[[nn.Module, Any], Any] | None = None


def _noisy(share: float) -> Callable[[Tensor], Tensor]:
    def change(w: Tensor) -> Tensor:
        noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(5))
        return w + share * w.std() * noise

    return change


def _with_row(row: int, factor: float) -> Callable[[Tensor], Tensor]:
    def change(w: Tensor) -> Tensor:
        w[row] *= factor
        return w

    return change


def _base(base: float) -> Callable[[Any], object]:
    def plant(model: Any) -> None:
        frequencies = model.model.rotary_emb.inv_freq
        frequencies.copy_(base ** -(torch.arange(len(frequencies)) / len(frequencies)))

    return plant


def _biased_norm(own: Any, x: Tensor) -> Tensor:
    m = own.__self__
    variance = x.var(-1, keepdim=True)  # by n - 1
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + m.eps) * m.weight + m.bias


def _parallel(own: Any, x: Tensor) -> Tensor:
    m = own.__self__
    return x + m.mix(m.n1(x)) + m.feed(m.n2(x))


def _scaled_branch(own: Any, x: Tensor) -> Tensor:
    m = own.__self__
    x = x + 1.02 * m.mix(m.n1(x))
    return x + m.feed(m.n2(x))


def _norm_after(own: Any, x: Tensor) -> Tensor:
    m = own.__self__
    x = m.n2(x + m.mix(m.n1(x)))
    return x + m.feed(x)


def _pick(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else change(outputs)


def _positions(first: int) -> Callable[[nn.Module, Any], Any]:
    return lambda model, x: model(**x, position_ids=torch.arange(first, first + LENGTH)[None])


def _drop_keys(model: nn.Module, x: Any) -> Any:
    seen = torch.ones_like(x["input_ids"])
    seen[1, 9:] = 0
    return model(**x, attention_mask=seen)


def _untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(1, 0))


def _in_decoders() -> Iterator[Fault]:
    layer = "model.layers.1"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    both = (attention, layer)
    yield Fault(
        "llama",
        "roll of k",
        (f"{attention}.k_proj",),
        set_weight(f"{attention}.k_proj.weight", lambda w: w.roll(16, 0)),
    )
    yield Fault(
        "llama", "rope base of a layer", both, lambda m: become(at(m, attention), forward=rotary(500000.0))
    )
    yield Fault(
        "llama+", "rope base of a layer", both, lambda m: become(at(m, attention), forward=rotary(500000.0))
    )
    yield Fault("llama", "rope base", ("model.rotary_emb",), _base(500000.0))
    yield Fault(
        "llama",
        "eps of a norm",
        (f"{layer}.input_layernorm",),
        set_values(f"{layer}.input_layernorm", variance_epsilon=1e-5),
    )
    yield Fault(
        "llama+",
        "eps of a norm",
        (f"{layer}.input_layernorm",),
        set_values(f"{layer}.input_layernorm", variance_epsilon=1e-3),
    )
    yield Fault("llama", "scale of the attention", both, set_values(attention, scaling=1 / 16))
    yield Fault("llama+", "scale of the attention", both, set_values(attention, scaling=1 / math.sqrt(64)))
    yield Fault(
        "llama+",
        "gate and up swapped",
        (mlp, f"{mlp}.gate_proj"),
        swap(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
    )
    yield Fault("llama+", "gelu for silu", (mlp, f"{mlp}.act_fn"), set_values(mlp, act_fn=nn.GELU()))
    yield Fault(
        "llama",
        "kv heads rolled",
        (f"{attention}.k_proj",),
        lambda m: [set_weight(f"{attention}.{p}_proj.weight", lambda w: w.roll(16, 0))(m) for p in "kv"],
    )
    yield Fault(
        "llama",
        "a weight with noise of 1 %",
        (f"{mlp}.up_proj",),
        set_weight(f"{mlp}.up_proj.weight", _noisy(0.01)),
    )
    yield Fault(
        "llama+",
        "a row of a weight lost",
        (f"{mlp}.down_proj",),
        set_weight(f"{mlp}.down_proj.weight", _with_row(3, 0.0)),
    )
    yield Fault(
        "llama+",
        "an unused word",
        ("model.embed_tokens",),
        set_weight("model.embed_tokens.weight", _with_row(-2, 0.5)),
    )
    yield Fault(
        "llama+",
        "padding seen by one side",
        ("model.layers.0.self_attn", "model", "model.layers.0"),
        call=_drop_keys,
    )
    yield Fault(
        "llama+",
        "tied head",
        ("lm_head",),
        lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
    )
    yield Fault(
        "qwen2+",
        "a bias missing",
        (f"{attention}.k_proj",),
        lambda m: setattr(at(m, f"{attention}.k_proj"), "bias", None),
    )
    yield Fault(
        "qwen2+",
        "a bias shifted",
        (f"{attention}.q_proj",),
        set_weight(f"{attention}.q_proj.bias", lambda b: b.roll(1)),
    )
    yield Fault(
        "qwen2",
        "residual scaled",
        (layer,),
        lambda m: become(
            at(m, layer),
            forward=with_forward(lambda own, x, *a, **k: _pick(own(x, *a, **k), lambda y: y + 0.02 * x)),
        ),
    )
    yield Fault(
        "qwen3+",
        "norm of q without weight",
        (f"{attention}.q_norm",),
        set_weight(f"{attention}.q_norm.weight", torch.ones_like),
    )
    yield Fault(
        "qwen3",
        "eps of the norm of k",
        (f"{attention}.k_norm",),
        set_values(f"{attention}.k_norm", variance_epsilon=1e-4),
    )
    yield Fault(
        "gemma",
        "embedding not scaled",
        ("model.embed_tokens", "model"),
        lambda m: m.model.embed_tokens.embed_scale.fill_(1.0),
    )
    yield Fault(
        "gemma+",
        "norm without the one",
        (f"{layer}.input_layernorm",),
        set_weight(f"{layer}.input_layernorm.weight", lambda w: w - 1),
    )
    yield Fault("gemma+", "gelu for its tanh form", (f"{mlp}.act_fn", mlp), set_values(mlp, act_fn=nn.GELU()))
    yield Fault("gemma2+", "softcap of a layer", both, set_values(attention, attn_logit_softcapping=5.0))
    yield Fault(
        "gemma2", "softcap of the logits", ("",), lambda m: setattr(m.config, "final_logit_softcapping", 1.0)
    )
    yield Fault(
        "gemma2+",
        "window",
        ("model.layers.0.self_attn", "model.layers.0", "model"),
        lambda m: setattr(m.config, "sliding_window", 5),
    )
    yield Fault(
        "gemma2+",
        "a norm left out",
        (f"{layer}.post_attention_layernorm", layer),
        set_forward(f"{layer}.post_attention_layernorm", lambda own, x: x),
    )
    yield Fault(
        "mistral+",
        "window",
        ("model.layers.0.self_attn", "model.layers.0", "model"),
        lambda m: setattr(m.config, "sliding_window", 6),
    )
    yield Fault(
        "mistral",
        "two layers swapped",
        (f"{layer}.mlp.down_proj",),
        swap(f"{mlp}.down_proj.weight", "model.layers.2.mlp.down_proj.weight"),
    )


def _in_gpt2() -> Iterator[Fault]:
    layer = "transformer.h.1"
    yield Fault(
        "gpt2+", "exact gelu", (f"{layer}.mlp.act", f"{layer}.mlp"), set_values(f"{layer}.mlp", act=nn.GELU())
    )
    yield Fault(
        "gpt2", "exact gelu", (f"{layer}.mlp.act", f"{layer}.mlp"), set_values(f"{layer}.mlp", act=nn.GELU())
    )
    yield Fault("gpt2", "positions from two", ("transformer", "transformer.wpe"), call=_positions(2))
    yield Fault(
        "gpt2", "scale by layer", (f"{layer}.attn", layer), set_values(f"{layer}.attn", scaling=1 / 8)
    )
    yield Fault(
        "gpt2+", "dropout left on", (f"{layer}.mlp.dropout",), lambda m: at(m, f"{layer}.mlp.dropout").train()
    )
    yield Fault(
        "gpt2",
        "order of q, k and v",
        (f"{layer}.attn.c_attn",),
        set_weight(f"{layer}.attn.c_attn.weight", lambda w: w.roll(64, 1)),
    )
    yield Fault("gpt2", "untied head", ("lm_head",), _untied)
    yield Fault(
        "gpt2",
        "a position never reached",
        ("transformer.wpe",),
        set_weight("transformer.wpe.weight", _with_row(-1, 2.0)),
    )
    yield Fault("gpt2+", "eps of a norm", (f"{layer}.ln_2",), set_values(f"{layer}.ln_2", eps=1e-3))


def _in_bert() -> Iterator[Fault]:
    layer = "bert.encoder.layer.1"
    yield Fault(
        "bert",
        "heads of the query rolled",
        (f"{layer}.attention.self.query",),
        set_weight(f"{layer}.attention.self.query.weight", lambda w: w.roll(16, 0)),
    )
    yield Fault(
        "bert+",
        "gelu by tanh",
        (f"{layer}.intermediate.intermediate_act_fn", f"{layer}.intermediate"),
        set_values(f"{layer}.intermediate", intermediate_act_fn=nn.GELU("tanh")),
    )
    yield Fault(
        "bert",
        "scale of the attention",
        (f"{layer}.attention.self",),
        set_values(f"{layer}.attention.self", scaling=0.125),
    )
    yield Fault(
        "bert+",
        "norm before the residual",
        (f"{layer}.output",),
        set_forward(f"{layer}.output", lambda own, x, y: own.__self__.LayerNorm(own.__self__.dense(x)) + y),
    )
    yield Fault(
        "bert",
        "type of the tokens",
        ("bert.embeddings", "bert.embeddings.token_type_embeddings"),
        call=lambda m, x: m(**x, token_type_ids=torch.ones_like(x["input_ids"])),
    )


def _in_t5() -> Iterator[Fault]:
    yield Fault(
        "t5+",
        "a bucket never reached",
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias",),
        set_weight(
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", _with_row(15, 3.0)
        ),
    )
    yield Fault(
        "t5+",
        "scores scaled",
        ("encoder.block.1.layer.0.SelfAttention",),
        set_values("encoder.block.1.layer.0.SelfAttention", scaling=0.25),
    )
    yield Fault(
        "t5",
        "distance of the buckets",
        (
            "encoder.block.0.layer.0.SelfAttention",
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        ),
        set_values(
            "encoder.block.0.layer.0.SelfAttention",
            relative_attention_max_distance=8,
            relative_attention_num_buckets=16,
        ),
    )
    yield Fault(
        "t5+",
        "eps in the decoder",
        ("decoder.block.1.layer.2.layer_norm",),
        set_values("decoder.block.1.layer.2.layer_norm", variance_epsilon=1e-3),
    )


def _in_vit() -> Iterator[Fault]:
    layer = "vit.layers.1"
    yield Fault(
        "vit+",
        "eps of a norm",
        (f"{layer}.layernorm_before",),
        set_values(f"{layer}.layernorm_before", eps=1e-4),
    )
    yield Fault(
        "vit",
        "patches turned",
        ("vit.embeddings.patch_embeddings.projection",),
        set_weight("vit.embeddings.patch_embeddings.projection.weight", lambda w: w.transpose(2, 3)),
    )
    yield Fault(
        "vit+",
        "a bias missing",
        (f"{layer}.attention.v_proj",),
        lambda m: setattr(at(m, f"{layer}.attention.v_proj"), "bias", None),
    )
    yield Fault(
        "vit",
        "scale of the attention",
        (f"{layer}.attention",),
        set_values(f"{layer}.attention", scaling=0.125),
    )


def _in_own() -> Iterator[Fault]:
    block = "blocks.1"
    mix = (f"{block}.mix",)
    yield Fault("plain+", "norm with one added", (f"{block}.n1",), set_values(f"{block}.n1", plus=1.0))
    yield Fault("plain", "rope base", mix, set_values(f"{block}.mix", base=500000.0))
    yield Fault("plain+", "window", mix, set_values(f"{block}.mix", window=9))
    yield Fault("plain+", "cap", mix, set_values(f"{block}.mix", cap=10.0))
    yield Fault("plain", "keys one position ahead", mix, set_values(f"{block}.mix", shift=1))
    yield Fault("plain+", "kv heads in another order", mix, set_values(f"{block}.mix", repeats=True))
    yield Fault("plain+", "parallel residual", (block,), set_forward(block, _parallel))
    yield Fault("plain", "branch scaled by 1.02", (block,), set_forward(block, _scaled_branch))
    yield Fault("plain+", "residual after the norm", (block,), set_forward(block, _norm_after))
    yield Fault(
        "plain",
        "clamp that cuts a few",
        (f"{block}.feed",),
        set_forward(f"{block}.feed", lambda own, x: own(x).clamp(-1e-3, 1e-3)),
    )
    yield Fault(
        "plain+",
        "a norm too many",
        ("norm", "head", ""),
        lambda m: setattr(m, "head", nn.Sequential(m.norm, m.head)),
    )
    yield Fault("mlp+", "variance by n - 1", ("4",), set_forward("4", _biased_norm))
    yield Fault("mlp", "weight scaled by 1.004", ("3",), set_weight("3.weight", lambda w: w * 1.004))
    yield Fault(
        "mlp+",
        "an element of a weight",
        ("3",),
        lambda m: set_weight(
            "3.weight", lambda w: w.index_put((torch.tensor(5), torch.tensor(7)), w[5, 7] * 1.05)
        )(m),
    )
    yield Fault("mlp", "relu for gelu", ("5",), lambda m: m.__setitem__(5, nn.ReLU()))
    yield Fault("mlp+", "gelu by tanh", ("2",), lambda m: m.__setitem__(2, nn.GELU("tanh")))
    yield Fault("conv+", "momentum of the statistics", ("4",), lambda m: m[4].running_mean.add_(0.02))
    yield Fault("conv+", "padding of another kind", ("3",), lambda m: m.__setitem__(3, _reflecting(m[3])))


def _reflecting(conv: nn.Conv2d) -> nn.Conv2d:
    made = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
    made.load_state_dict(conv.state_dict())
    return made


FAULTS = [*_in_decoders(), *_in_gpt2(), *_in_bert(), *_in_t5(), *_in_vit(), *_in_own()]
