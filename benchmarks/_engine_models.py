"""Independent implementations of Llama and GPT-2, with their weights taken from transformers' and faults to plant.

Names, fusions and shapes differ from transformers' on purpose: Llama has q, k, v and gate, up fused and packs its
tokens; GPT-2 has q, k and v apart.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Scale(nn.Module):
    """RMS norm."""

    def __init__(self, width: int, eps: float, fault: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.fault == "norm in bf16":
            wide = x.bfloat16()
        mean = (
            wide.abs().mean(-1, keepdim=True) ** 2
            if self.fault == "L1 norm"
            else wide.square().mean(-1, keepdim=True)
        )
        weight = 1 + self.weight if self.fault == "norm weight plus one" else self.weight
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * weight


class SelfAttention(nn.Module):
    """Attention with rotary positions and grouped keys over packed tokens."""

    def __init__(self, config: Any, fault: str) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size = config.hidden_size // self.heads
        self.wqkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.groups) * self.size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.base = config.rope_parameters["rope_theta"]
        self.fault = fault

    def turn(self, x: Tensor, start: int) -> Tensor:
        size = self.size // 2 if self.fault == "rotary dimension" else self.size
        base = 500.0 if self.fault == "rope base" else self.base
        inverse = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.arange(start, start + x.shape[1], dtype=torch.float32)[:, None] * inverse
        cos, sin = (f(angles).repeat(1, 2).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
        part, rest = x[..., :size], x[..., size:]
        one, other = part.chunk(2, -1)
        if self.fault == "interleaved rope":
            pairs = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
            return torch.cat([part * cos + pairs * sin, rest], -1)
        turned = torch.cat([other, -one] if self.fault == "rope sign" else [-other, one], -1)
        return torch.cat([part * cos + turned * sin, rest], -1)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        sizes = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        q, k, v = (
            y.view(batch, -1, y.shape[-1] // self.size, self.size) for y in self.wqkv(x).split(sizes, -1)
        )
        start = self.fault == "positions from one"
        q, k = self.turn(q, 0), self.turn(k, int(start))
        many = self.heads // self.groups
        if self.fault == "key groups":
            k, v = (y.repeat(1, 1, many, 1) for y in (k, v))
        else:
            k, v = (y.repeat_interleave(many, 2) for y in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        scores = scores / (self.size if self.fault == "scores by size" else math.sqrt(self.size))
        shift = {"mask off by one": 2, "mask without self": 0, "no mask": 10**6}.get(self.fault, 1)
        length = scores.shape[-1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(shift)
        if not shift:
            hidden[0, 0] = False
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.fault == "window":
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).tril(-6), -torch.inf)
        if self.fault == "softmax in bf16":
            scores = scores.bfloat16()
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).to(v.dtype), v).reshape(len(x), -1)
        return self.wo(out)


class GatedUnit(nn.Module):
    """SwiGLU with both projections in one."""

    def __init__(self, config: Any, fault: str) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        if self.fault == "gate and up swapped":
            gate, up = up, gate
        active = F.gelu(gate) if self.fault == "another activation" else F.silu(gate)
        if self.fault == "accumulation in bf16":
            return (active * up).bfloat16().matmul(self.w2.weight.bfloat16().t()).to(x.dtype)
        return self.w2(active * up)


class Block(nn.Module):
    """Block that passes hidden and residual apart, as inference engines do."""

    def __init__(self, config: Any, fault: str) -> None:
        super().__init__()
        self.pre = Scale(config.hidden_size, 1e-3 if fault == "eps" else config.rms_norm_eps, fault)
        self.mix = SelfAttention(config, fault)
        self.mid = Scale(config.hidden_size, config.rms_norm_eps)
        self.feed = GatedUnit(config, fault)
        self.fault = fault

    def forward(self, hidden: Tensor, residual: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        residual = hidden + residual
        first, second = (self.mid, self.pre) if self.fault == "norm order" else (self.pre, self.mid)
        hidden = self.mix(first(residual), batch)
        if self.fault == "residual after norm":
            return self.feed(second(hidden + residual)), second(hidden + residual)
        if self.fault == "parallel residual":
            return self.feed(second(residual)), hidden + residual
        residual = residual + (0.5 * hidden if self.fault == "residual scale" else hidden)
        return self.feed(second(residual)), residual


class Llama(nn.Module):
    """Llama over packed tokens, with the weights of transformers' LlamaForCausalLM. `fault` is in block 1."""

    def __init__(self, other: Any, fault: str = "", at: int = 1) -> None:
        super().__init__()
        config = other.config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(config, fault if i == at else "") for i in range(config.num_hidden_layers)
        )
        self.final = Scale(
            config.hidden_size,
            config.rms_norm_eps,
            fault if fault == "norm weight plus one" and at < 0 else "",
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fault = fault
        with torch.no_grad():
            self.tokens.weight.copy_(other.model.embed_tokens.weight)
            self.final.weight.copy_(other.model.norm.weight)
            self.head.weight.copy_(
                other.model.embed_tokens.weight if fault == "tied head" else other.lm_head.weight
            )
            for i, (mine, theirs) in enumerate(zip(self.blocks, other.model.layers, strict=True)):
                mine.pre.weight.copy_(theirs.input_layernorm.weight)
                mine.mid.weight.copy_(theirs.post_attention_layernorm.weight)
                attention = theirs.self_attn
                mine.mix.wqkv.weight.copy_(
                    torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
                )
                mine.mix.wo.weight.copy_(attention.o_proj.weight)
                mine.feed.w13.weight.copy_(
                    torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight])
                )
                mine.feed.w2.weight.copy_(theirs.mlp.down_proj.weight)
                if fault == "a row of a weight lost" and i == at:
                    mine.feed.w2.weight[3] = 0

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids.flatten())
        if self.fault == "embedding scale":
            hidden = hidden * math.sqrt(hidden.shape[-1])
        residual = torch.zeros_like(hidden)
        for block in self.blocks:
            hidden, residual = block(hidden, residual, len(ids))
        return self.head(self.final(hidden + residual)).view(*ids.shape, -1)


class Layer(nn.Module):
    """GPT-2's block, with attention in its own forward and q, k and v apart."""

    def __init__(self, config: Any, fault: str) -> None:
        super().__init__()
        width = config.n_embd
        eps = config.layer_norm_epsilon
        self.norm1, self.norm2 = (
            nn.LayerNorm(width, eps),
            nn.LayerNorm(width, 1e-3 if fault == "eps" else eps),
        )
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=fault != "missing bias")
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = config.n_head
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.fault == "heads mixed up":
            q = q.flip(1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        y = self.up(self.norm2(x))
        return x + self.down(F.gelu(y, approximate="none" if self.fault == "exact gelu" else "tanh"))


class GPT2(nn.Module):
    """GPT-2 with the weights of transformers' GPT2LMHeadModel. `fault` is in layer 1."""

    def __init__(self, other: Any, fault: str = "", at: int = 1) -> None:
        super().__init__()
        config, theirs = other.config, other.transformer
        self.words = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.n_positions, config.n_embd)
        self.layers = nn.ModuleList(Layer(config, fault if i == at else "") for i in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.fault = fault
        with torch.no_grad():
            pairs = [
                (self.words, theirs.wte),
                (self.places, theirs.wpe),
                (self.norm, theirs.ln_f),
                (self.head, other.lm_head),
            ]
            for mine, block in zip(self.layers, theirs.h, strict=True):
                pairs += [(mine.norm1, block.ln_1), (mine.norm2, block.ln_2), (mine.out, block.attn.c_proj)]
                pairs += [(mine.up, block.mlp.c_fc), (mine.down, block.mlp.c_proj)]
                weights, biases = block.attn.c_attn.weight.t().chunk(3), block.attn.c_attn.bias.chunk(3)
                for part, weight, bias in zip(
                    (mine.query, mine.key, mine.value), weights, biases, strict=True
                ):
                    part.weight.copy_(weight)
                    part.bias.copy_(bias)
            for mine, one in pairs:
                mine.weight.copy_(one.weight.t() if type(one).__name__ == "Conv1D" else one.weight)
                if getattr(mine, "bias", None) is not None:
                    mine.bias.copy_(one.bias)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]) + 2 * (self.fault == "positions from two")
        x = self.words(ids) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.fault == "no final norm" else self.norm(x))
