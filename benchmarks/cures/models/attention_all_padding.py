"""Self-attention over sets of neighbours, one of which is empty."""

import torch
from torch import Tensor, nn


class SetBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mixed, _ = self.attend(x, x, x, key_padding_mask=padding)
        return x + mixed


class SetEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5, 8)
        self.block = SetBlock(8)
        self.head = nn.Linear(8, 1)

    def forward(self, neighbours: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.block(self.project(neighbours), padding))


def make() -> nn.Module:
    torch.manual_seed(0)
    return SetEncoder()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 2, 0, 3])
    return torch.randn(4, 4, 5, generator=g), torch.arange(4) >= lengths.unsqueeze(1)
