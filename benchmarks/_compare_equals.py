"""Pairs for judge_compare.py that compute the same: copies, and the same mathematics written in another way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _compare_models import at, become, gelu_by_parts, with_forward
from torch import Tensor, nn


class Equal(NamedTuple):
    """Change of a copy of a model that changes rounding alone. `make` changes the copy or returns another model."""

    model: str
    name: str
    make: Callable[[Any], nn.Module | None] = lambda model: None
    call: Callable[[nn.Module, Any], Any] | None = None


class FusedAttention(nn.Module):
    """Attention of `_compare_models` with one projection and PyTorch's own attention."""

    def __init__(self, other: Any, *, tables: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.size = other.heads, other.groups, other.size
        self.qkv = nn.Linear(64, (self.heads + 2 * self.groups) * self.size, bias=False)
        self.out = other.wo
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([one.weight for one in (other.wq, other.wk, other.wv)]))
        angles = other.angles(32).float()
        self.tables = tables
        if tables:
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        self.base = other.base

    def turned(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        if self.tables:
            cos, sin = self.cos[:length], self.sin[:length]
        else:
            inverse = 1.0 / self.base ** (torch.arange(0, self.size, 2, dtype=torch.float32) / self.size)
            angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        q, k, v = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in self.qkv(x).split(sizes, -1))
        y = nn.functional.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class FusedGate(nn.Module):
    """Gate and up in one layer."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.w13, self.w2 = nn.Linear(64, 192, bias=False), other.down
        with torch.no_grad():
            self.w13.weight.copy_(torch.cat([other.gate.weight, other.up.weight]))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        return self.w2(up * (gate * torch.sigmoid(gate)))


def _each_block(change: Callable[[Any], object]) -> Callable[[Any], None]:
    def make(model: Any) -> None:
        for block in model.blocks:
            change(block)

    return make


def _eager(model: Any) -> None:
    model.set_attn_implementation("eager")


def _hidden_order(path: str, down: str, *ups: str) -> Callable[[Any], None]:
    """Put the hidden numbers of a feed-forward layer into another order."""

    def make(model: Any) -> None:
        width = at(model, f"{path}.{down}").weight.shape[1]
        order = torch.randperm(width, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            for up in ups:
                at(model, f"{path}.{up}").weight.copy_(at(model, f"{path}.{up}").weight[order])
            at(model, f"{path}.{down}").weight.copy_(at(model, f"{path}.{down}").weight[:, order])

    return make


def _interleaved(block: Any) -> None:
    """Turn pairs of neighbours, as Meta's Llama, with the rows of q and k in that order."""
    mix = block.mix
    order = torch.arange(mix.size).view(2, -1).t().flatten()
    with torch.no_grad():
        for part in (mix.wq, mix.wk):
            part.weight.copy_(part.weight.view(-1, mix.size, 64)[:, order].reshape(-1, 64))

    def turned(self: Any, x: Tensor, shift: int = 0) -> Tensor:
        angles = self.angles(x.shape[-2] + shift)[shift:]
        pairs = torch.view_as_complex(
            x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
        )
        turn = torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)

    become(mix, turned=turned)


def _folded_norm(block: Any) -> None:
    """Count the weight of the norm from one."""
    with torch.no_grad():
        block.n1.weight.sub_(1.0)
    block.n1.plus = 1.0


def _folded_scale(block: Any) -> None:
    with torch.no_grad():
        block.mix.wq.weight.mul_(block.mix.scale)
    block.mix.scale = 1.0


def _heads_apart(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over one head after the other, with a softmax of its own."""
    found = []
    for i in range(q.shape[1]):
        scores = q[:, i] * self.scale @ k[:, i].transpose(-1, -2)
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1).to(scores.dtype)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        found.append(weights @ v[:, i] / weights.sum(-1, keepdim=True))
    return torch.stack(found, 1)


def _rms(own: Any, x: Tensor) -> Tensor:
    norm = own.__self__
    return nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def _wide_rms(own: Any, x: Tensor) -> Tensor:
    """Weight before the cast, as T5 and Gemma."""
    norm = own.__self__
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (norm.weight * (wide / (wide.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt())).to(x.dtype)


def _layer_norm(own: Any, x: Tensor) -> Tensor:
    norm = own.__self__
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (wide * norm.weight + norm.bias).to(x.dtype)


def _in_columns(own: Any, x: Tensor) -> Tensor:
    """The product as a sum over two halves of the inputs."""
    layer = own.__self__
    halves = zip(x.chunk(2, -1), layer.weight.chunk(2, 1), strict=True)
    a, b = (nn.functional.linear(part, weight) for part, weight in halves)
    return a + b if layer.bias is None else a + b + layer.bias


def _without_batch_norm(model: Any) -> nn.Module:
    """Fold the statistics into the convolution before them."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    layers = list(copy.deepcopy(model))
    for i in (0, 3):
        layers[i], layers[i + 1] = fuse_conv_bn_eval(layers[i], layers[i + 1]), nn.Identity()
    return nn.Sequential(*layers).eval()


def _linear(conv: Any) -> nn.Linear:
    made = nn.Linear(*conv.weight.shape, bias=True)
    with torch.no_grad():
        made.weight.copy_(conv.weight.t())
        made.bias.copy_(conv.bias)
    return made


def _with_linears(model: Any) -> None:
    for block in model.transformer.h:
        block.attn.c_attn, block.attn.c_proj = _linear(block.attn.c_attn), _linear(block.attn.c_proj)
        block.mlp.c_fc, block.mlp.c_proj = _linear(block.mlp.c_fc), _linear(block.mlp.c_proj)


def _chunks(own: Any, x: Tensor) -> Tensor:
    return torch.cat([own(part) for part in x.split(5, 1)], 1)


def _at_each(model: Any, kind: str, change: Callable[..., Any]) -> None:
    for module in [one for one in model.modules() if type(one).__name__ == kind]:
        become(module, forward=with_forward(change))


def _autocast(model: nn.Module, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**x) if isinstance(x, dict) else model(x)


def _equal() -> Iterator[Equal]:
    for model in ("llama", "qwen3+", "gemma2+", "gpt2", "bert+", "t5+", "vit", "plain", "conv+"):
        yield Equal(model, "copy")
    for model in ("llama", "llama+", "gpt2+", "bert", "vit+", "qwen2+"):
        yield Equal(model, "eager and sdpa", _eager)
    for model in ("plain", "plain+"):
        yield Equal(
            model, "fused q, k, v, sdpa", _each_block(lambda b: setattr(b, "mix", FusedAttention(b.mix)))
        )
        yield Equal(
            model,
            "fused, rotary tables",
            _each_block(lambda b: setattr(b, "mix", FusedAttention(b.mix, tables=True))),
        )
        yield Equal(model, "heads one by one", _each_block(lambda b: become(b.mix, weighted=_heads_apart)))
        yield Equal(model, "interleaved rotary", _each_block(_interleaved))
        yield Equal(model, "weight before the cast", lambda m: _at_each(m, "Norm", _wide_rms))
    yield Equal("plain+", "fused gate and up", _each_block(lambda b: setattr(b, "feed", FusedGate(b.feed))))
    yield Equal("plain+", "norm counted from one", _each_block(_folded_norm))
    yield Equal("plain+", "scale folded into q", _each_block(_folded_scale))
    yield Equal("plain+", "another order inside", _hidden_order("blocks.1.feed", "down", "gate", "up"))
    yield Equal(
        "llama",
        "another order inside",
        _hidden_order("model.layers.1.mlp", "down_proj", "gate_proj", "up_proj"),
    )
    yield Equal("plain", "F.rms_norm", lambda m: _at_each(m, "Norm", _rms))
    yield Equal(
        "llama+",
        "positions shifted, which rotary does not see",
        call=lambda m, x: m(**x, position_ids=torch.arange(3, 15)[None]),
    )
    yield Equal("llama", "products in halves", lambda m: _at_each(m, "Linear", _in_columns))
    yield Equal("mlp+", "products in halves", lambda m: _at_each(m, "Linear", _in_columns))
    yield Equal("mlp+", "gelu by parts", lambda m: _at_each(m, "GELU", lambda own, x: gelu_by_parts(x)))
    yield Equal("mlp+", "layer norm by hand", lambda m: _at_each(m, "LayerNorm", _layer_norm))
    yield Equal("mlp+", "tokens in two parts", lambda m: _at_each(m, "Linear", _chunks))
    yield Equal("gpt2", "Linear for Conv1D", _with_linears)
    yield Equal("conv+", "statistics folded", _without_batch_norm)
    yield Equal("llama", "autocast on both", call=_autocast)
    yield Equal("bert+", "autocast and eager", _eager, call=_autocast)


EQUALS = list(_equal())
