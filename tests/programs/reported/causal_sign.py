"""Causal attention with compressed keys and values."""

import torch
from torch import Tensor, nn


class MemoryCompressedAttention(nn.Module):
    def __init__(self, width: int, factor: int = 2) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(width, 3 * width)
        self.compress = nn.Conv1d(width, width, factor, stride=factor)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        k, v = (self.compress(t.transpose(1, 2)).transpose(1, 2) for t in (k, v))
        dots = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        steps = torch.arange(q.shape[1])[:, None]
        mask = steps < torch.arange(k.shape[1])[None] * self.factor
        dots = dots.masked_fill(mask, -float("-inf"))  # culprit
        return torch.softmax(dots, dim=-1) @ v


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = MemoryCompressedAttention(width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attn(self.norm(x)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Block()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 8, 8, generator=g),)
