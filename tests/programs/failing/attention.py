"""Attention, positions and sampling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from programs.case import PRODUCTS, Setup, failure


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-2, -1)  # culprit: attention_logits
        probs = (scores * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.out(probs @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


@failure(module="attn.out", label="input[0]", origin="received", source_module="attn", operations=PRODUCTS)
def attention_logits() -> Setup:
    """The logits q·k leave float16 before they are scaled."""
    model = Block(64)
    with torch.no_grad():
        model.attn.q.weight.mul_(200)
        model.attn.k.weight.mul_(200)
    return Setup(model.half(), (torch.randn(2, 6, 64).half(),))


class AdditiveMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.attn = Scores()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        bias = (1.0 - keep) * float("-inf")  # culprit: mask_times_infinity
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.attn(q, k, v, bias)


class Scores(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@failure(
    module="attn", label="input[3]", origin="received", source_module="", value="nan+inf", operations="mul"
)
def mask_times_infinity() -> Setup:
    """An additive mask is made as (1 - keep) × -inf, where keep is 1."""
    keep = torch.ones(5, 5).tril()
    return Setup(AdditiveMask(), (torch.randn(5, 16), keep))
