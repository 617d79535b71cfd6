"""Kernel-based neural ranking."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KernelPooling(nn.Module):
    centres: Tensor

    def __init__(self, kernels: int = 5, sigma: float = 0.05) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-1, 1, kernels))
        self.sigma = sigma

    def forward(self, match: Tensor) -> Tensor:
        gap = match[:, None] - self.centres[None, :, None, None]
        kernels = torch.exp(-0.5 * (gap / self.sigma).square())
        return torch.log(kernels.sum(-1)).sum(-1)


class KNRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.pooling = KernelPooling()
        self.out = nn.Linear(5, 1)

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        q = F.normalize(self.embedding(query), dim=-1)
        d = F.normalize(self.embedding(document), dim=-1)
        return torch.tanh(self.out(self.pooling(q @ d.transpose(1, 2))))


def make() -> nn.Module:
    torch.manual_seed(0)
    return KNRM()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.full((2, 3), 7), torch.full((2, 6), 7) + 0 * torch.randint(2, (2, 6), generator=g)
