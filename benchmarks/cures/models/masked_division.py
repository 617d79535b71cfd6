"""Click-through rates per slot, where a slot without impressions counts as zero."""

import torch
from torch import Tensor, nn


class Rates(nn.Module):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        y = x / count
        return y.masked_fill(count == 0, 0.0)


class SlotModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.clicks = nn.Linear(5, 4)
        self.ratio = Rates()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return self.out(self.ratio(self.clicks(x), count)).squeeze(-1)


def make() -> nn.Module:
    torch.manual_seed(0)
    return SlotModel()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    count = torch.randint(1, 9, (4, 4), generator=g).float()
    count[2, 1] = 0.0
    return torch.randn(4, 5, generator=g), count


def loss(output: Tensor) -> Tensor:
    return output.square().mean()
