"""Attention, normalisation layers and formats of 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread

BASE = "https://github.com/"


class SigmoidAttention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.query(x) @ self.key(x).mT * 400 - 600)
        normalizer = scores.sum(-1, keepdim=True)
        return scores / normalizer @ self.value(x)  # culprit: sigmoid_attention


@thread(BASE + "qitianwu/DIFFormer/issues/3")
def sigmoid_attention():
    return SigmoidAttention(), (torch.randn(2, 5, 8) * 0.1,), lambda model, x: model(x).pow(2).mean()


class FeedForward(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        with torch.no_grad():
            self.down.weight.mul_(300)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(hidden)))  # culprit: residual_overflow


@thread(BASE + "huggingface/transformers/pull/19229")
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


@thread(BASE + "huggingface/diffusers/pull/9097")
def gated_block():
    block = GatedBlock()
    with torch.no_grad():
        block.gate.weight.mul_(900)
        block.value.weight.mul_(900)
        block.down.weight.mul_(0.01)
    return block.half(), (torch.randn(2, 8).half(),), lambda model, x: model(x).float().pow(2).mean()
