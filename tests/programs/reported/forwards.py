"""Models rebuilt from public reports that fail in the forward, or in a loss. Their code is our own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import Setup, failure, summed


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
        dots = dots.masked_fill(mask, -float("-inf"))  # culprit: causal_sign
        return torch.softmax(dots, dim=-1) @ v


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = MemoryCompressedAttention(width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attn(self.norm(x)))


@failure("lucidrains/memory-compressed-attention/issues/2", module="attn", label="", operations="masked_fill")
def causal_sign() -> Setup:
    """Causal attention with compressed keys and values."""
    model = Block()
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.randn(2, 8, 8, generator=g),), loss=summed)


EPS = 1e-8


class BoxCoder(nn.Module):
    def forward(self, sizes: Tensor, anchors: Tensor) -> Tensor:
        anchors = anchors + EPS
        sizes = sizes + EPS
        return torch.log(sizes) - torch.log(anchors)  # culprit: half_box_coder


class SizeHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.coder = BoxCoder()

    def forward(self, features: Tensor, sizes: Tensor, anchors: Tensor) -> Tensor:
        target = self.coder(sizes, anchors)
        return (self.fc(features) - target).abs().mean()


@failure("rwightman/efficientdet-pytorch/issues/291", module="coder", label="", operations="log")
def half_box_coder() -> Setup:
    """Encoding of boxes against anchors in half precision."""
    model = SizeHead().half()
    g = torch.Generator().manual_seed(0)
    sizes = torch.rand(5, 4, generator=g) + 0.1
    sizes[3, 1] = 0.0
    anchors = torch.rand(5, 4, generator=g) + 0.1
    return Setup(model, (torch.randn(5, 6, generator=g).half(), sizes.half(), anchors.half()), loss=summed)


class QualityModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.features(x))).squeeze(-1)  # culprit: learning_rate_quality


@failure("pavancm/CONTRIQUE/issues/8", module="head", label="", operations="addmm")
def learning_rate_quality() -> Setup:
    """Image quality regression."""

    def batch(step: int) -> tuple[Tensor]:
        return (torch.randn(6, 8, generator=torch.Generator().manual_seed(step)),)

    return Setup(
        QualityModel(),
        batch=batch,
        loss=lambda output: (output - 1).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=3.0),
        steps=5,
    )
