"""Semi-supervised node classification with a dense adjacency."""

import torch
from torch import Tensor, nn


class GCNConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(-1)
        inv_sqrt = degree.pow(-0.5)
        norm = inv_sqrt[:, None] * adjacency * inv_sqrt[None]
        return norm @ self.linear(x)


class NodeClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.out(torch.relu(self.conv(x, adjacency)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return NodeClassifier()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    adjacency = torch.ones(6, 6) - torch.eye(6)
    adjacency[4], adjacency[:, 4] = 0.0, 0.0
    return torch.randn(6, 5, generator=g), adjacency
