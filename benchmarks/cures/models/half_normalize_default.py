"""Cosine attention in half precision."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


class CosineAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = unit(q) @ unit(k).transpose(1, 2)
        return torch.softmax(scores, dim=-1) @ v


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = CosineAttention(6)
        self.head = nn.Linear(6, 3)

    def forward(self, windows: Tensor) -> Tensor:
        return self.head(self.attention(windows).mean(1))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Swin().half()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    windows = torch.randn(2, 4, 6, generator=g)
    windows[0, 3] = 0.0
    return (windows.half(),)
