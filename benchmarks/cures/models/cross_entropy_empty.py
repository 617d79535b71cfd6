"""Second stage of a detector: classification of the sampled proposals."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SampledClassLoss(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor, overlap: Tensor) -> Tensor:
        keep = overlap > 0.5
        return F.cross_entropy(logits[keep], labels[keep])


class BoxHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 16)
        self.cls = nn.Linear(16, 4)
        self.classify_loss = SampledClassLoss()

    def forward(self, pooled: Tensor, labels: Tensor, overlap: Tensor) -> Tensor:
        return self.classify_loss(self.cls(torch.relu(self.fc(pooled))), labels, overlap)


class SecondStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = BoxHead()

    def forward(self, pooled: Tensor, labels: Tensor, overlap: Tensor) -> Tensor:
        return self.head(pooled, labels, overlap)


def make() -> nn.Module:
    torch.manual_seed(0)
    return SecondStage()


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (6,), generator=g)
    return torch.randn(6, 8, generator=g), labels, torch.rand(6, generator=g) * 0.4
