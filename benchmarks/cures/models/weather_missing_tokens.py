"""Self-supervised training on observations with gaps."""

import torch
from torch import Tensor, nn


class MaskedL1(nn.Module):
    def forward(self, student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        per_token = (student - teacher).abs().mean(-1)
        masked = per_token * mask
        return (masked.sum(1) / mask.sum(1).clamp(min=1)).mean()


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.forecast = nn.Sequential(nn.GELU(), nn.Linear(8, 4))
        self.ssl_loss = MaskedL1()

    def forward(self, tokens: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        return self.ssl_loss(self.forecast(self.embed(tokens)), teacher, mask)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Student()


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    teacher = torch.randn(2, 6, 4, generator=g)
    teacher[0, 3] = float("inf")
    mask = torch.ones(2, 6)
    mask[0, 3] = 0.0
    return torch.randn(2, 6, 3, generator=g), teacher, mask
