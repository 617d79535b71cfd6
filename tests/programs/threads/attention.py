"""Attention, normalisation layers and formats of 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import loss_by, thread
from programs.threads import encoder


class SigmoidAttention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.query(x) @ self.key(x).mT * 400 - 600)
        normalizer = scores.sum(-1, keepdim=True)
        return scores / normalizer @ self.value(x)  # culprit: sigmoid_attention


@thread("qitianwu/DIFFormer/issues/3")
def sigmoid_attention():
    return SigmoidAttention(), (torch.randn(2, 5, 8) * 0.1,), lambda model, x: model(x).pow(2).mean()


class QueryDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 8))
        self.k, self.v, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, pixels: Tensor, blocked: Tensor) -> Tensor:
        scores = self.queries @ self.k(pixels).mT
        scores = scores.masked_fill(blocked, float("-inf"))
        attended = scores.softmax(-1) @ self.v(pixels)  # culprit: masked_queries
        return self.head(attended)


@thread("facebookresearch/Mask2Former/issues/243")
def masked_queries():
    blocked = torch.zeros(3, 6, dtype=torch.bool)
    blocked[1] = True
    return QueryDecoder(), (torch.randn(6, 8), blocked), lambda model, x, m: model(x, m).pow(2).mean()


class FeedForward(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        with torch.no_grad():
            self.down.weight.mul_(300)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(hidden)))  # culprit: residual_overflow


@thread("huggingface/transformers/pull/19229")
def residual_overflow():
    model = nn.Sequential(nn.Linear(8, 8), FeedForward(), nn.LayerNorm(8)).half()
    with torch.no_grad():
        model[0].bias.fill_(6e4)
        model[0].bias[::2] = 1e2
        model[1].down.bias.fill_(2e4)
        model[1].up.weight.mul_(1e-3)
    return model, (torch.randn(2, 3, 8).half(),), lambda model, x: model(x).float().pow(2).mean()


class GatedBlock(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate, self.value, self.down = nn.Linear(width, 16), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.gate(x)) * self.value(x)  # culprit: gated_block
        return x + self.down(hidden)


@thread("huggingface/diffusers/pull/9097")
def gated_block():
    block = GatedBlock()
    with torch.no_grad():
        block.gate.weight.mul_(900)
        block.value.weight.mul_(900)
        block.down.weight.mul_(0.01)
    return block.half(), (torch.randn(2, 8).half(),), lambda model, x: model(x).float().pow(2).mean()


class TokenPooling(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mask = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)  # culprit: empty_sentence


@thread("NVIDIA-BioNeMo/bionemo-recipes/pull/958")
def empty_sentence():
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.pool, self.head = nn.Embedding(9, 8), TokenPooling(), encoder(8, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.pool(self.embed(tokens), tokens != 0))

    tokens = torch.tensor([[1, 2, 0], [0, 0, 0]])
    return Classifier(), (tokens, torch.tensor([0, 1])), loss_by(F.cross_entropy)
