"""A variational graph autoencoder."""

import torch
from torch import Tensor, nn


class Reparametrize(nn.Module):
    def forward(self, mu: Tensor, logstd: Tensor, noise: Tensor) -> Tensor:
        return mu + noise * torch.exp(logstd)


class GraphEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 8)
        self.mu = nn.Linear(8, 3)
        self.logstd = nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(adjacency @ self.shared(x))
        return self.mu(h), self.logstd(h)


class VGAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = GraphEncoder()
        self.reparametrize = Reparametrize()

    def forward(self, x: Tensor, adjacency: Tensor, noise: Tensor) -> Tensor:
        z = self.reparametrize(*self.encoder(x, adjacency), noise)
        return z @ z.T


def make() -> nn.Module:
    torch.manual_seed(0)
    model = VGAE()
    nn.init.constant_(model.encoder.logstd.bias, 95.0)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=g), torch.full((5, 5), 0.2), torch.randn(5, 3, generator=g)
